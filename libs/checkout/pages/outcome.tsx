/** Pages without input: waiting, the receipt, refused requests, and all other ends of a checkout. */
import type { Cents, ErrorCode } from '#kernel';
import { brandName, dayAndTime, money } from './format.js';
import { type Frame, Layout, type Line, Lines, Sign } from './layout.js';
import { type Text, TEXTS } from './text.js';

/** Seconds after which a waiting page loads again. */
export const ASK_AGAIN_SECONDS = 3;
/** Seconds after which a waiting page loads again if the payer may already leave. */
const ASK_AGAIN_LATE_SECONDS = 15;

interface WaitingProps {
  readonly frame: Frame;
  readonly checkoutId: string;
  /** Set when the payer may go back without an outcome. */
  readonly reference: string | null;
}

export const Waiting = ({ frame, checkoutId, reference }: WaitingProps) => {
  const text = TEXTS[frame.locale];
  const late = reference !== null;
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
                <dd class="code">{reference}</dd>
              </div>
            </dl>
            <a class="button" href={`/checkout/${checkoutId}/done`}>
              {text.done}
            </a>
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

/** A heading, some sentences, and at most one link. */
interface MessageProps {
  readonly frame: Frame;
  readonly sign: 'good' | 'stop';
  readonly title: string;
  readonly paragraphs: readonly string[];
  readonly fact?: { readonly name: string; readonly value: string } | null;
  readonly way?: { readonly href: string; readonly label: string } | null;
}

const Message = ({ frame, sign, title, paragraphs, fact, way }: MessageProps) => (
  <Layout frame={frame} title={title}>
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
      {way && (
        <a class="button" href={way.href}>
          {way.label}
        </a>
      )}
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
}

/** `checkoutId` null: the address of the agency is not known or not allowed any more. */
export const Cancelled = ({ frame, checkoutId }: Omit<EndedProps, 'checkoutId'> & { readonly checkoutId: string | null }) => {
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

/** `checkoutId` null: as in {@link Cancelled}. */
export const Expired = ({ frame, checkoutId }: { readonly frame: Frame; readonly checkoutId: string | null }) => {
  const text = TEXTS[frame.locale];
  return (
    <Message
      frame={frame}
      sign="stop"
      title={text.expired}
      paragraphs={[text.nothingTaken, text.expiredMore]}
      way={checkoutId === null ? null : wayBack(frame, text, checkoutId)}
    />
  );
};

export const AttemptsUsedUp = ({ frame, checkoutId }: EndedProps) => {
  const text = TEXTS[frame.locale];
  return (
    <Message
      frame={frame}
      sign="stop"
      title={text.attemptsUsedUp}
      paragraphs={[text.nothingTaken, text.attemptsUsedUpMore]}
      way={wayBack(frame, text, checkoutId)}
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
