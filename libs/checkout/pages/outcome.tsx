/** Pages without input: waiting, the receipt, refused requests, and all other ends of a checkout. */
import type { Cents, ErrorCode } from '#kernel';
import { brandName, dayAndTime, money } from './format.js';
import { Action, type Frame, Layout, type Line, Lines, type Proof, Sign } from './layout.js';
import { type Text, TEXTS } from './text.js';

/** Seconds after which a waiting page loads again. */
export const ASK_AGAIN_SECONDS = 3;
/** Seconds after which a waiting page loads again if the payer may already leave. */
const ASK_AGAIN_LATE_SECONDS = 15;

interface WaitingProps {
  readonly frame: Frame;
  readonly checkoutId: string;
  /** Set when the payer may go back without an outcome. */
  readonly late: { readonly reference: string; readonly proof: Proof } | null;
}

export const Waiting = ({ frame, checkoutId, late }: WaitingProps) => {
  const text = TEXTS[frame.locale];
  return (
    <Layout
      frame={frame}
      title={text.processing}
      againAfterSeconds={late ? ASK_AGAIN_LATE_SECONDS : ASK_AGAIN_SECONDS}
      stage={late ? 'late' : 'waiting'}
    >
      <section class="panel centre">
        <Sign kind="wait" />
        <h1>{text.processing}</h1>
        <p role="status">{late ? text.processingLate : text.processingMore}</p>
        {late && (
          <>
            <dl class="facts">
              <div>
                <dt>{text.reference}</dt>
                <dd class="code">{late.reference}</dd>
              </div>
            </dl>
            <Action path={`/checkout/${checkoutId}/done`} proof={late.proof}>
              <button class="button" type="submit">
                {text.done}
              </button>
            </Action>
          </>
        )}
      </section>
    </Layout>
  );
};

/** The fields of a payment on a receipt. */
export interface ReceiptPayment {
  readonly confirmationNumber: string | null;
  readonly referenceId: string | null;
  readonly paymentMethod: { readonly brand: string; readonly last4: string };
  readonly lineItems: readonly Line[];
  readonly amountCents: Cents;
  readonly serviceFeeCents: Cents;
  readonly totalChargedCents: Cents;
  readonly refundedAmountCents: Cents;
  readonly settlement: { readonly status: string } | null;
  readonly capturedAt: string | null;
  readonly createdAt: string;
}

interface ReceiptProps {
  readonly frame: Frame;
  /** null: the way back to the partner is gone. */
  readonly checkoutId: string | null;
  readonly payment: ReceiptPayment;
}

export const Receipt = ({ frame, checkoutId, payment }: ReceiptProps) => {
  const { locale } = frame;
  const text = TEXTS[locale];
  const { brand, last4 } = payment.paymentMethod;
  const at = payment.capturedAt ?? payment.createdAt;
  return (
    <Layout frame={frame} title={text.paid}>
      <section class="panel receipt">
        <div class="centre">
          <Sign kind="good" />
          <h1>{text.paid}</h1>
          <p class="sum">{money(locale, payment.totalChargedCents)}</p>
        </div>
        {payment.settlement?.status === 'rejected' && <p role="status">{text.settlementRejected}</p>}
        <dl class="facts">
          <div class="wide">
            <dt>{text.confirmation}</dt>
            <dd class="code">{payment.confirmationNumber}</dd>
          </div>
          <div>
            <dt>{text.paidTo}</dt>
            <dd>{frame.agency}</dd>
          </div>
          <div>
            <dt>{text.card}</dt>
            <dd>{text.cardEnding(brandName(brand, text.card), last4)}</dd>
          </div>
          <div>
            <dt>{text.date}</dt>
            <dd>
              <time dateTime={at} data-local="date">
                {dayAndTime(locale, at)}
              </time>
            </dd>
          </div>
          {payment.referenceId !== null && (
            <div>
              <dt>{text.reference}</dt>
              <dd>{payment.referenceId}</dd>
            </div>
          )}
          {payment.refundedAmountCents > 0 && (
            <div>
              <dt>{text.returned}</dt>
              <dd>{money(locale, payment.refundedAmountCents)}</dd>
            </div>
          )}
        </dl>
        <Lines
          locale={locale}
          text={text}
          lines={payment.lineItems}
          amountCents={payment.amountCents}
          serviceFeeCents={payment.serviceFeeCents}
          caption={text.paid}
        />
        <p class="no-print">{text.keepReceipt}</p>
        {checkoutId !== null && (
          <a class="button no-print" href={`/checkout/${checkoutId}/done`}>
            {text.done}
          </a>
        )}
        <button class="quiet no-print" id="print" type="button" hidden>
          {text.print}
        </button>
      </section>
    </Layout>
  );
};

/** A heading, some sentences, and at most one link or button. */
interface MessageProps {
  readonly frame: Frame;
  readonly sign: 'good' | 'wait' | 'stop';
  readonly title: string;
  readonly paragraphs: readonly string[];
  readonly fact?: { readonly name: string; readonly value: string } | null;
  /** `proof` absent: a link. */
  readonly way?: { readonly href: string; readonly label: string; readonly proof?: Proof | null } | null;
  readonly onwardTo?: string;
}

const Message = ({ frame, sign, title, paragraphs, fact, way, onwardTo }: MessageProps) => (
  <Layout frame={frame} title={title} onwardTo={onwardTo}>
    <section class="panel centre">
      <Sign kind={sign} />
      <h1>{title}</h1>
      {paragraphs.map((paragraph) => (
        <p>{paragraph}</p>
      ))}
      {fact && (
        <dl class="facts">
          <div>
            <dt>{fact.name}</dt>
            <dd class="code">{fact.value}</dd>
          </div>
        </dl>
      )}
      {way &&
        (way.proof === undefined ? (
          <a class="button" href={way.href}>
            {way.label}
          </a>
        ) : (
          <Action path={way.href} proof={way.proof}>
            <button class="button" type="submit">
              {way.label}
            </button>
          </Action>
        ))}
    </section>
  </Layout>
);

const wayBack = ({ agency }: Frame, text: Text, checkoutId: string) => ({
  href: `/checkout/${checkoutId}/cancel`,
  label: text.returnTo(agency ?? ''),
});

interface EndedProps {
  readonly frame: Frame;
  readonly checkoutId: string;
  readonly proof: Proof;
}

/** Asks before the checkout ends. A GET must not end it, since programs open links, too. */
export const Leave = ({ frame, checkoutId, proof }: EndedProps) => {
  const text = TEXTS[frame.locale];
  const label = text.cancelAndReturn(frame.agency ?? '');
  return (
    <Message
      frame={frame}
      sign="stop"
      title={text.cancel}
      paragraphs={[text.nothingTaken]}
      way={{ ...wayBack(frame, text, checkoutId), label, proof }}
    />
  );
};

/**
 * Follows the form by which a payer leaves. `form-action` lets no form lead to another site, not by a redirect either. So this page leads on.
 */
export const Left = ({ frame, href }: { readonly frame: Frame; readonly href: string }) => {
  const label = TEXTS[frame.locale].returnTo(frame.agency ?? '');
  return <Message frame={frame} sign="wait" title={label} paragraphs={[]} way={{ href, label }} onwardTo={href} />;
};

/** `checkoutId` null: the address of the agency is not known or not allowed any more. */
export const Cancelled = ({ frame, checkoutId }: { readonly frame: Frame; readonly checkoutId: string | null }) => {
  const text = TEXTS[frame.locale];
  return (
    <Message
      frame={frame}
      sign="stop"
      title={text.cancelled}
      paragraphs={[text.nothingTaken, text.cancelledMore]}
      way={checkoutId === null ? null : wayBack(frame, text, checkoutId)}
    />
  );
};

/** `checkoutId` null: as in {@link Cancelled}. Any browser may end a checkout that has expired. */
export const Expired = ({ frame, checkoutId }: { readonly frame: Frame; readonly checkoutId: string | null }) => {
  const text = TEXTS[frame.locale];
  return (
    <Message
      frame={frame}
      sign="stop"
      title={text.expired}
      paragraphs={[text.nothingTaken, text.expiredMore]}
      way={checkoutId === null ? null : { ...wayBack(frame, text, checkoutId), proof: null }}
    />
  );
};

export const AttemptsUsedUp = ({ frame, checkoutId, proof }: EndedProps) => {
  const text = TEXTS[frame.locale];
  return (
    <Message
      frame={frame}
      sign="stop"
      title={text.attemptsUsedUp}
      paragraphs={[text.nothingTaken, text.attemptsUsedUpMore]}
      way={{ ...wayBack(frame, text, checkoutId), proof }}
    />
  );
};

interface PaidBeforeProps {
  readonly frame: Frame;
  readonly checkoutId: string;
  readonly confirmationNumber: string;
  /** True if this browser paid. Other browsers see only the end of the confirmation number, and no data of the payer. */
  readonly bound: boolean;
  /** True if the payer opened the partner's link again. */
  readonly byLink: boolean;
}

export const PaidBefore = ({ frame, checkoutId, confirmationNumber, bound, byLink }: PaidBeforeProps) => {
  const text = TEXTS[frame.locale];
  return (
    <Message
      frame={frame}
      sign="good"
      title={byLink ? text.alreadyPaid : text.complete}
      paragraphs={[byLink ? text.alreadyPaidMore : text.completeMore]}
      fact={{ name: text.confirmation, value: bound ? confirmationNumber : `…${confirmationNumber.replaceAll('-', '').slice(-4)}` }}
      way={bound ? { href: `/checkout/${checkoutId}/receipt`, label: text.showReceipt } : null}
    />
  );
};

interface CannotStartProps {
  readonly frame: Frame;
  readonly code: ErrorCode;
  readonly reference: string | null;
}

export const CannotStart = ({ frame, code, reference }: CannotStartProps) => {
  const text = TEXTS[frame.locale];
  const why = text.cannotStartMore[code] ?? text.refusals[code] ?? text.otherRefusal;
  return (
    <Message
      frame={frame}
      sign="stop"
      title={text.cannotStart}
      paragraphs={[text.nothingTaken, why, text.askAgency]}
      fact={{ name: code, value: reference ?? '–' }}
    />
  );
};

/** Refusals of a request, not of a payment. Each is a key in the texts. */
export type RefusedRequest = 'notFound' | 'otherBrowser' | 'notFromHere' | 'tooMany' | 'unavailable' | 'failedInside';

interface RefusedProps {
  readonly frame: Frame;
  readonly what: RefusedRequest;
  readonly reference: string;
  /** The session of the request. The page links to it. null or absent: no link. */
  readonly checkoutId?: string | null;
}

export const Refused = ({ frame, what, reference, checkoutId = null }: RefusedProps) => {
  const text = TEXTS[frame.locale];
  return (
    <Message
      frame={frame}
      sign="stop"
      title={text[what]}
      paragraphs={[text[`${what}More`]]}
      fact={{ name: text.reference, value: reference }}
      way={checkoutId === null ? null : { href: `/checkout/${checkoutId}`, label: text.toPaymentPage }}
    />
  );
};
