/** The page with the card form. It works without scripts. The server never fills in the card fields. */
import type { Cents } from '#kernel';
import type { Refusal } from '../checkout.js';
import { money, timeOfDay } from './format.js';
import { Action, type Frame, Layout, type Line, Lines, type Proof, ProofFields } from './layout.js';
import { type FieldFault, type Text, TEXTS } from './text.js';

/** Names of the form's fields. Each field sets its own `autocomplete` value. The form sets `off`. */
export const CARD_FIELDS = ['card_number', 'expiry', 'security_code'] as const;
export const PAYER_FIELDS = ['postal_code', 'first_name', 'last_name', 'email'] as const;
export type PayField = (typeof CARD_FIELDS)[number] | (typeof PAYER_FIELDS)[number];

/** Messages above the form. */
export type Notice = { readonly kind: 'refused'; readonly refusal: Refusal } | { readonly kind: 'fee_changed' } | { readonly kind: 'out_of_date' };

export interface PayPage {
  readonly checkoutId: string;
  readonly lines: readonly Line[];
  readonly amountCents: Cents;
  readonly serviceFeeCents: Cents;
  readonly proof: Proof;
  readonly expiresAt: string;
  readonly values: Readonly<Partial<Record<(typeof PAYER_FIELDS)[number], string>>>;
  readonly faults: Readonly<Partial<Record<PayField, FieldFault>>>;
  readonly notice: Notice | null;
}

interface FieldShape {
  readonly name: PayField;
  readonly label: (text: Text) => string;
  readonly hint?: (text: Text) => string;
  readonly optional?: boolean;
  readonly autocomplete: string;
  readonly inputmode?: 'numeric' | 'email';
  readonly maxLength: number;
}

const CARD: readonly FieldShape[] = [
  { name: 'card_number', label: (text) => text.cardNumber, autocomplete: 'cc-number', inputmode: 'numeric', maxLength: 30 },
  { name: 'expiry', label: (text) => text.expiry, hint: (text) => text.expiryHint, autocomplete: 'cc-exp', inputmode: 'numeric', maxLength: 7 },
  {
    name: 'security_code',
    label: (text) => text.securityCode,
    hint: (text) => text.securityCodeHint,
    autocomplete: 'cc-csc',
    inputmode: 'numeric',
    maxLength: 4,
  },
  { name: 'postal_code', label: (text) => text.postalCode, optional: true, autocomplete: 'postal-code', maxLength: 20 },
];
const PAYER: readonly FieldShape[] = [
  { name: 'first_name', label: (text) => text.firstName, optional: true, autocomplete: 'given-name', maxLength: 100 },
  { name: 'last_name', label: (text) => text.lastName, optional: true, autocomplete: 'family-name', maxLength: 100 },
  { name: 'email', label: (text) => text.email, optional: true, autocomplete: 'email', inputmode: 'email', maxLength: 254 },
];

export const noticeText = (text: Text, notice: Notice): string => {
  if (notice.kind === 'fee_changed') return text.feeChanged;
  if (notice.kind === 'out_of_date') return text.formOutOfDate;
  const { code, declineCode } = notice.refusal;
  if (declineCode === 'fee_changed') return text.feeChanged;
  return (declineCode === null ? undefined : text.declines[declineCode]) ?? text.refusals[code] ?? text.otherRefusal;
};

export const Pay = ({ frame, page }: { readonly frame: Frame; readonly page: PayPage }) => {
  const { locale, agency } = frame;
  const text = TEXTS[locale];
  const { faults, notice } = page;
  const wrong = [...CARD, ...PAYER].filter(({ name }) => faults[name] !== undefined);
  const title = `${notice || wrong.length > 0 ? text.errorPrefix : ''}${text.payTo(agency ?? '')}`;
  const path = `/checkout/${page.checkoutId}`;
  return (
    <Layout frame={frame} title={title} takesCard>
      {(notice || wrong.length > 0) && (
        <div class="problem" role="alert" tabIndex={-1} autofocus>
          <h2>{text.problem}</h2>
          {notice && (
            <p>
              {noticeText(text, notice)} <strong>{text.nothingTaken}</strong>
            </p>
          )}
          {wrong.length > 0 && (
            <ul>
              {wrong.map(({ name }) => (
                <li>
                  <a href={`#${name}`}>{text.faults[faults[name]!]}</a>
                </li>
              ))}
            </ul>
          )}
        </div>
      )}
      <section class="panel" aria-labelledby="what">
        <h1 id="what">{text.whatYouPay}</h1>
        <Lines
          locale={locale}
          text={text}
          lines={page.lines}
          amountCents={page.amountCents}
          serviceFeeCents={page.serviceFeeCents}
          caption={text.whatYouPay}
        />
      </section>
      <form class="panel" id="pay" method="post" action={`${path}/pay`} autocomplete="off" noValidate data-paying={text.paying}>
        <ProofFields {...page.proof} />
        <input type="hidden" name="quoted_total_cents" value={String(page.amountCents + page.serviceFeeCents)} />
        <fieldset>
          <legend>{text.card}</legend>
          <div class="fields">
            {CARD.map((shape) => (
              <Field shape={shape} text={text} page={page} />
            ))}
          </div>
        </fieldset>
        <fieldset>
          <legend>{text.aboutYou}</legend>
          <div class="fields">
            {PAYER.map((shape) => (
              <Field shape={shape} text={text} page={page} />
            ))}
          </div>
        </fieldset>
        <button class="button" type="submit">
          {text.pay(money(locale, page.amountCents + page.serviceFeeCents))}
        </button>
      </form>
      <Action class="aside" path={`${path}/cancel`} proof={page.proof}>
        <button type="submit">{text.cancelAndReturn(agency ?? '')}</button>
      </Action>
      <form class="time" id="time" method="post" action={`${path}/extend`}>
        <ProofFields {...page.proof} />
        <p role="status">
          {text.closesAt}{' '}
          <time dateTime={page.expiresAt} data-local="time">
            {timeOfDay(locale, page.expiresAt)}
          </time>
        </p>
        <button class="quiet" type="submit">
          {text.moreTime}
        </button>
      </form>
    </Layout>
  );
};

const Field = ({ shape, text, page }: { readonly shape: FieldShape; readonly text: Text; readonly page: PayPage }) => {
  const { name, autocomplete, inputmode, maxLength, optional = false } = shape;
  const fault = page.faults[name];
  const hint = shape.hint?.(text);
  const described = [hint === undefined ? null : `${name}-hint`, fault === undefined ? null : `${name}-fault`].filter(Boolean).join(' ');
  // Fill in only the payer's own data again, never card data.
  const value = (PAYER_FIELDS as readonly string[]).includes(name) ? page.values[name as (typeof PAYER_FIELDS)[number]] : undefined;
  return (
    <div class={`field ${name}${fault === undefined ? '' : ' wrong'}`}>
      <label for={name}>
        {shape.label(text)} {optional && <span class="small">({text.optional})</span>}
      </label>
      {hint !== undefined && (
        <span class="small" id={`${name}-hint`}>
          {hint}
        </span>
      )}
      {fault !== undefined && (
        <span class="fault" id={`${name}-fault`}>
          {text.faults[fault]}
        </span>
      )}
      <input
        id={name}
        name={name}
        type="text"
        autocomplete={autocomplete}
        {...(inputmode ? { inputMode: inputmode } : {})}
        {...(name === 'email' || name === 'card_number' ? { autocapitalize: 'none', spellcheck: false } : {})}
        maxLength={maxLength}
        {...(optional ? {} : { 'aria-required': 'true' })}
        {...(described === '' ? {} : { 'aria-describedby': described })}
        {...(fault === undefined ? {} : { 'aria-invalid': 'true' })}
        {...(value === undefined ? {} : { value })}
      />
      {name === 'card_number' && <span class="brand" aria-hidden="true"></span>}
    </div>
  );
};
