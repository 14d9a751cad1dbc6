/** Parts of every page: language, head, the agency's name, the sandbox banner, and shared pieces. */
import type { ComponentChildren } from 'preact';
import type { Cents } from '#kernel';
import { money } from './format.js';
import { type Locale, type Text, TEXTS } from './text.js';

/** Values that all pages of one request share. */
export interface Frame {
  readonly locale: Locale;
  /** null: no portal is known. */
  readonly agency: string | null;
  readonly sandbox: boolean;
  /** Addresses of the stylesheet, the script and the icon. */
  readonly assets: { readonly css: string; readonly js: string; readonly icon: string };
}

interface LayoutProps {
  readonly frame: Frame;
  readonly title: string;
  /** For browsers without scripts: seconds after which a waiting page loads again. With scripts, the page's script asks the server instead. */
  readonly againAfterSeconds?: number;
  /** The path to which the browser goes on at once, with and without scripts. */
  readonly onwardTo?: string;
  /** The state of a waiting page. The script reloads the page when this text changes. */
  readonly stage?: string;
  /** True if the page has a card form. */
  readonly takesCard?: boolean;
  readonly children: ComponentChildren;
}

export const Layout = ({ frame, title, againAfterSeconds, onwardTo, stage, takesCard = false, children }: LayoutProps) => {
  const { locale, agency, sandbox, assets } = frame;
  const text = TEXTS[locale];
  return (
    <html lang={locale}>
      <head>
        <meta charset="utf-8" />
        <meta name="viewport" content="width=device-width, initial-scale=1" />
        <meta name="color-scheme" content="light dark" />
        <title>{agency === null || title.includes(agency) ? title : `${title} – ${agency}`}</title>
        <link rel="stylesheet" href={assets.css} />
        <link rel="icon" href={assets.icon} type="image/svg+xml" />
        <script src={assets.js} defer></script>
        {againAfterSeconds !== undefined && (
          <noscript>
            <meta http-equiv="refresh" content={String(againAfterSeconds)} />
          </noscript>
        )}
        {onwardTo !== undefined && <meta http-equiv="refresh" content={`0;url=${onwardTo}`} />}
      </head>
      <body {...(stage === undefined ? {} : { 'data-stage': stage })}>
        <header class="top">
          <div class="column">
            {agency === null ? (
              <>
                <Lock />
                <span class="agency">{text.securePayment}</span>
              </>
            ) : (
              <>
                <span class="mark" aria-hidden="true">
                  {agency.replace(/^(city|county|town|state|ciudad|condado) (of|de) /i, '').slice(0, 1)}
                </span>
                <span class="agency">{agency}</span>
              </>
            )}
          </div>
        </header>
        {sandbox && (
          <aside class="sandbox">
            <strong>{text.testMode}</strong> {takesCard && <span>{text.testCard}</span>}
          </aside>
        )}
        <main class="column">{children}</main>
        <footer class="column">
          <Lock /> <span>{text.notStored}</span>
        </footer>
      </body>
    </html>
  );
};

/** Proves that a form comes from our page, in the browser that holds the session's cookie. */
export interface Proof {
  readonly attemptId: string;
  readonly token: string;
}

/** A form without fields to fill in. `proof` null: the action needs none. */
interface ActionProps {
  readonly path: string;
  readonly proof: Proof | null;
  readonly class?: string;
  readonly children: ComponentChildren;
}
export const Action = ({ path, proof, class: kind, children }: ActionProps) => (
  <form class={kind} method="post" action={path}>
    {proof && <ProofFields {...proof} />}
    {children}
  </form>
);

export const ProofFields = ({ attemptId, token }: Proof) => (
  <>
    <input type="hidden" name="attempt_id" value={attemptId} />
    <input type="hidden" name="csrf" value={token} />
  </>
);

const Lock = () => (
  <svg class="icon" viewBox="0 0 16 16" width="16" height="16" aria-hidden="true">
    <path d="M4 7V5a4 4 0 0 1 8 0v2h.5A1.5 1.5 0 0 1 14 8.5v5a1.5 1.5 0 0 1-1.5 1.5h-9A1.5 1.5 0 0 1 2 13.5v-5A1.5 1.5 0 0 1 3.5 7zm1.5 0h5V5a2.5 2.5 0 0 0-5 0z" />
  </svg>
);

/** The symbol above a heading. It shows the kind of outcome. */
export const Sign = ({ kind }: { readonly kind: 'good' | 'wait' | 'stop' }) => (
  <div class={`sign ${kind}`} aria-hidden="true">
    {kind !== 'wait' && (
      <svg viewBox="0 0 24 24" width="28" height="28">
        <path d={kind === 'good' ? 'M4.5 12.5l5 5 10-11' : 'M12 5.5v8M12 18v.5'} />
      </svg>
    )}
  </div>
);

export interface Line {
  readonly referenceId: string;
  readonly description: string | null;
  readonly amountCents: Cents;
}

interface LinesProps {
  readonly locale: Locale;
  readonly text: Text;
  readonly lines: readonly Line[];
  readonly amountCents: Cents;
  readonly serviceFeeCents: Cents;
  readonly caption: string;
}

/** The lines to pay, and their sum. */
export const Lines = ({ locale, text, lines, amountCents, serviceFeeCents, caption }: LinesProps) => (
  <table class="lines">
    <caption class="unseen">{caption}</caption>
    <thead class="unseen">
      <tr>
        <th scope="col">{text.item}</th>
        <th scope="col">{text.amount}</th>
      </tr>
    </thead>
    <tbody>
      {lines.map((line) => (
        <tr>
          <th scope="row">
            {line.description ?? line.referenceId}
            {line.description !== null && (
              <span class="small">
                {text.reference} {line.referenceId}
              </span>
            )}
          </th>
          <td>{money(locale, line.amountCents)}</td>
        </tr>
      ))}
    </tbody>
    <tfoot>
      <tr>
        <th scope="row">{text.subtotal}</th>
        <td>{money(locale, amountCents)}</td>
      </tr>
      <tr>
        <th scope="row">{text.serviceFee}</th>
        <td>{money(locale, serviceFeeCents)}</td>
      </tr>
      <tr class="total">
        <th scope="row">{text.total}</th>
        <td>{money(locale, amountCents + serviceFeeCents)}</td>
      </tr>
    </tfoot>
  </table>
);
