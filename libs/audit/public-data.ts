/**
 * The part of an event's data that the change feed shows: ids, references, codes, times and cents. Personal data, texts that people write, names of
 * staff, and keys and their hashes stay here (docs/decisions/0053-change-feed.md).
 *
 * Each field of each event type has a decision. A field without a decision is not shown, and public-data.unit.spec.ts fails for it.
 */
import type { Json } from '#kernel';

/**
 * The decisions, by event type: the number of its versions, then its fields in all of them. A field is written as a path through objects; the
 * elements of a list have the path of the list. `-` before a path hides it with everything below it.
 */
export const DECISIONS: Readonly<Record<string, readonly [versions: number, fields: string]>> = {
  // accounts
  AccountCreated: [1, 'accountId name'],
  AccountDeactivated: [1, 'accountId'],
  AccountReactivated: [1, 'accountId'],
  AccountRetentionSet: [1, 'accountId years'],
  ApiKeyIssued: [1, 'accountId key.environment key.keyId -key.kid -key.lookupId -key.secretHash'],
  ApiKeyRevoked: [1, 'accountId keyId'],
  ApiKeysRotated: [1, 'accountId endedKeyIds key.environment key.keyId -key.kid -key.lookupId -key.secretHash'],
  CaseAllowed: [2, 'portalId referenceId -personal -reason'],
  CaseBlocked: [2, 'portalId referenceId until -personal -reason'],
  CaseHeld: [2, 'portalId referenceId until -personal -reason'],
  MerchantAccountAdded: [
    1,
    'environment externalId gateway merchantAccount name settings.cutOff.time settings.cutOff.timeZone -credentials -settings.endpoint',
  ],
  MerchantAccountChecked: [1, 'guarantees.guarantee guarantees.result merchantAccount runId -guarantees.detail'],
  MerchantAccountCredentialsRotated: [1, 'merchantAccount -credentials'],
  MerchantAccountDisabled: [1, 'merchantAccount scope -reason'],
  MerchantAccountEnabled: [1, 'merchantAccount'],
  MerchantAccountSettingsChanged: [1, 'merchantAccount name settings.cutOff.time settings.cutOff.timeZone -settings.endpoint'],
  PortalAccessGranted: [1, 'accountId portalId'],
  PortalAccessRevoked: [1, 'accountId portalId'],
  PortalCheckoutConfigured: [
    2,
    'portalId checkout.agencyName checkout.allow checkout.colour checkout.enabled checkout.locale checkout.requireSignedIntake',
  ],
  PortalCodingSet: [1, 'portalId keys'],
  PortalCreated: [
    2,
    `portalId ownerAccountId name feeVersion fee.chargeMode fee.flatCents fee.maxCents fee.minCents fee.percentBps gateway.environment
     gateway.feeMerchantAccount gateway.gateway gateway.merchantAccount -gateway.credentialsRef -gateway.feeCredentialsRef -signingSecret`,
  ],
  PortalFeeChanged: [1, 'portalId feeVersion fee.chargeMode fee.flatCents fee.maxCents fee.minCents fee.percentBps'],
  PortalGatewaySet: [
    2,
    'portalId gateway.environment gateway.feeMerchantAccount gateway.gateway gateway.merchantAccount -gateway.credentialsRef -gateway.feeCredentialsRef',
  ],
  PortalLimitsSet: [1, 'portalId scope limits.attempts limits.blockSeconds limits.declines limits.windowSeconds'],
  PortalRulesSet: [1, 'portalId rules.brands rules.maxCents rules.minCents'],
  PortalSigningSecretActivated: [1, 'portalId'],
  PortalSigningSecretStaged: [1, 'portalId -signingSecret'],

  // payments
  FeeRefunded: [2, 'attemptId feeCents leg pending principalCents transactionId'],
  PaymentAbandoned: [1, 'accountId attemptId -reason'],
  PaymentCreated: [2, 'attemptId confirmationNumber legs.authCode legs.avs legs.card.brand legs.card.last4 legs.cvv legs.leg legs.transactionId'],
  PaymentDeclined: [
    4,
    `attemptId avs cvv declineCode leg transactionId takenBack.amountCents takenBack.leg takenBack.means takenBack.transactionId takenBack.voidTransactionId
     -raw`,
  ],
  PaymentDisputed: [
    3,
    `disputeId disputedAmountCents dueDate leg openedOn overtakenBy reasonCode source.externalId source.gateway source.merchantAccount stage status
     taken.excessCents taken.feeCents taken.leg taken.principalCents -personal -reason`,
  ],
  PaymentFailed: [2, 'attemptId takenBack.amountCents takenBack.leg takenBack.means takenBack.transactionId takenBack.voidTransactionId -reason'],
  PaymentInitiated: [
    4,
    `accountId amountCents attemptId chargeMode feeVersion legs.account.environment legs.account.gateway legs.account.merchantAccount
     legs.feeCents legs.leg legs.principalCents legs.references.charge legs.references.reversal lineItems.amountCents lineItems.coding
     lineItems.id lineItems.referenceId lineItems.serviceFeeCents paymentMethod.brand paymentMethod.last4 paymentMethod.type portalId
     referenceId serviceFeeCents -idempotency -legs.account.credentialsRef -lineItems.description -lineItems.metadata -payer -personal`,
  ],
  PaymentLost: [
    1,
    `accountId attemptId paymentId portalId references.account.environment references.account.gateway references.account.merchantAccount references.leg
     references.references.charge references.references.reversal -references.account.credentialsRef`,
  ],
  PaymentOutcomeUnknown: [1, 'attemptId leg -cause'],
  PaymentRefunded: [2, 'attemptId feeCents leg pending principalCents transactionId'],
  PaymentResolved: [
    1,
    `as forced charge.confirmationNumber charge.legs.authCode charge.legs.avs charge.legs.cvv charge.legs.leg charge.legs.transactionId
     -by -evidence`,
  ],
  PaymentSettled: [1, 'batchId closedAt feeCents grossCents leg'],
  PaymentVoided: [2, 'attemptId feeCents leg principalCents transactionId undone.chargeTransactionId undone.means'],
  ReconciliationStarted: [1, 'attemptId'],
  RefundFailed: [1, 'leg transactionId'],
  RefundRequested: [
    3,
    `asked.amountCents asked.includeFee attemptId completes initiatedBy legs.feeCents legs.leg legs.means legs.principalCents
     legs.references.refund legs.references.void lines.feeCents lines.lineItemId lines.principalCents -idempotency -personal -reason`,
  ],
  ReturnRequested: [1, 'exceptionId'],
  ReturnedElsewhere: [1, 'leg returnId status transactionId'],
  ReversalAcknowledged: [2, 'attemptId toldAs -idempotency'],
  ReversalEnded: [2, 'amountCents attemptId initiatedBy operation outcome reversalType -personal -reason'],
  SettlementRejected: [1, 'batchId closedAt leg'],
  SettlementWithdrawn: [1, 'batchId closedAt feeCents grossCents leg'],
  StaffTaskAcknowledged: [3, 'paymentId task -by -reason'],
  // `reason` is the name of the task.
  StaffTaskRaised: [3, 'paymentId reason -evidence'],
  VoidRequested: [
    3,
    `asked.amountCents asked.includeFee attemptId completes initiatedBy legs.feeCents legs.leg legs.means legs.principalCents
     legs.references.refund legs.references.void lines.feeCents lines.lineItemId lines.principalCents -idempotency -personal -reason`,
  ],

  // settlement
  BatchFunded: [1, 'agencyPortalId batchId fundedOn gateway merchantAccount netCents'],
  BatchFundingWithdrawn: [1, 'agencyPortalId batchId fundedOn gateway merchantAccount netCents'],
  ExceptionAssigned: [1, '-by -to'],
  ExceptionExplained: [1, '-by -reason'],
  ExceptionOpened: [
    3,
    'batchId exceptionId expectedCents gateway grossCents kind leg line merchantAccount paymentId ref suspenseCents transactionId',
  ],
  ExceptionRefundEnded: [1, 'attemptId outcome transactionId'],
  ExceptionRefundRequested: [
    1,
    `account.environment account.gateway account.merchantAccount amountCents attemptId chargeTransactionId last4 leg paymentId ref
     -account.credentialsRef -by -reason`,
  ],
  ExceptionResolved: [1, 'feeCents merchantAccount paymentId portalId resolution suspenseCents -by -reason'],
  ExceptionSuperseded: [1, '-by -reason'],
  SettlementBatchListed: [1, 'batchId closedAt differing feeCents fundedOn gateway grossCents lineCount merchantAccount netCents'],
  SettlementBatchRecorded: [1, 'batchId closedAt feeCents fundedOn gateway grossCents lineCount listed merchantAccount netCents'],
  SettlementFileImported: [1, 'batches.amountCents batches.batchId batches.count corrected lines sha256 -name'],
  SettlementLinesCorrected: [
    2,
    `batchId closedAt corrections.after.accepted corrections.after.expectedCents corrections.after.feeCents corrections.after.grossCents
     corrections.after.leg corrections.after.netCents corrections.after.number corrections.after.paymentId corrections.after.ref
     corrections.after.result corrections.after.transactionId corrections.after.type corrections.after.undone corrections.before.accepted
     corrections.before.expectedCents corrections.before.feeCents corrections.before.grossCents corrections.before.leg
     corrections.before.netCents corrections.before.number corrections.before.paymentId corrections.before.ref corrections.before.result
     corrections.before.transactionId corrections.before.type corrections.before.undone fileId fundedOn gateway merchantAccount -reference`,
  ],
  SettlementLinesRecorded: [
    2,
    `batchId closedAt gateway lines.accepted lines.expectedCents lines.feeCents lines.grossCents lines.leg lines.netCents lines.number
     lines.paymentId lines.ref lines.result lines.transactionId lines.type lines.undone merchantAccount`,
  ],

  // ledger
  AgencyRemittanceReversed: [1, 'cents on portalId remittanceId -by -reason'],
  AgencyRemitted: [1, 'advance cents on portalId reference remittanceId -by'],
  ManualAdjustment: [1, 'adjustmentId effectiveAt postings.account postings.cents -by -reason'],
  PeriodClosed: [1, 'from to -by'],
  PostingRuleChanged: [1, 'rule version'],
  TrialBalanceRecorded: [
    1,
    'closing.account closing.creditCents closing.debitCents digest entries opening.account opening.creditCents opening.debitCents position to',
  ],

  // privacy
  PersonalDataErased: [1, 'cause erasureId reasonCode subjects.stream -subjects.keyId'],

  // audit and the log
  AuditKeyIssued: [2, 'environment keyId personal role scope.accounts scope.portals -kid -lookupId -name -secretHash'],
  AuditKeyRevoked: [1, 'keyId'],
  InstallationCreated: [1, 'createdAt installationId'],

  // checkout
  AttemptDeclined: [1, 'attemptId code declineCode'],
  AttemptStarted: [1, 'attemptId paymentId'],
  CheckoutCancelled: [1, ''],
  CheckoutExpired: [1, ''],
  CheckoutExtended: [1, 'expiresAt'],
  CheckoutOpened: [1, ''],
  CheckoutPaid: [1, 'attemptId paymentId'],
  CheckoutStarted: [
    2,
    `accountId amountCents checkoutId expiresAt intake locale opened portalId referenceId signed -cancelUrl -content -fingerprint -lineItems
     -payer -returnUrl -state`,
  ],
  OutcomeUnknown: [1, 'attemptId paymentId'],
  PayerLeft: [1, ''],

  // webhooks
  // An address may hold a secret.
  WebhookEndpointAdded: [1, 'accountId endpointId secretId -url'],
  WebhookEndpointDisabled: [1, 'endpointId'],
  WebhookEndpointPaused: [1, 'endpointId'],
  WebhookEndpointResumed: [1, 'endpointId'],
  WebhookRedeliveryRequested: [1, 'deliveries.deliveryId deliveries.endpointId deliveries.eventId deliveries.round'],
  WebhookSecretActivated: [1, 'endpointId secretId'],
  WebhookSecretStaged: [1, 'endpointId secretId'],
};

/** The fields that are shown, each with what is shown below it. `true`: the whole value. */
type Shown = readonly (readonly [field: string, below: Shown | true])[];

/** The paths of a text, shown or hidden. */
export const pathsIn = (fields: string): { readonly shown: readonly string[]; readonly hidden: readonly string[] } => {
  const paths = fields.split(/\s+/).filter(Boolean);
  return { shown: paths.filter((path) => !path.startsWith('-')), hidden: paths.flatMap((path) => (path.startsWith('-') ? [path.slice(1)] : [])) };
};

const shownOf = (paths: readonly (readonly string[])[]): Shown => {
  const fields = new Map<string, string[][]>();
  for (const [field, ...rest] of paths) fields.set(field!, [...(fields.get(field!) ?? []), rest]);
  return [...fields].map(([field, below]) => [field, below[0]!.length === 0 ? true : shownOf(below)]);
};

const SHOWN: ReadonlyMap<string, { readonly versions: number; readonly shown: Shown }> = new Map(
  Object.entries(DECISIONS).map(([type, [versions, fields]]) => [
    type,
    { versions, shown: shownOf(pathsIn(fields).shown.map((path) => path.split('.'))) },
  ]),
);

const shownPart = (value: Json, shown: Shown): Json => {
  if (value === null || typeof value !== 'object') return value;
  if (Array.isArray(value)) return value.map((one) => shownPart(one, shown));
  const part: Record<string, Json> = {};
  for (const [name, below] of shown) {
    const field = value[name];
    if (field !== undefined) part[name] = below === true ? field : shownPart(field, below);
  }
  return part;
};

/** The public part of an event's data, as it was written. null: this release does not know the version of this type. */
export const publicData = ({ type, v, data }: { readonly type: string; readonly v: number; readonly data: Json }): Json => {
  const known = SHOWN.get(type);
  return known === undefined || v > known.versions ? null : shownPart(data, known.shown);
};

/** True if the type has a decision. */
export const isEventType = (type: string): boolean => SHOWN.has(type);
