/** A service with every type of event in its log. The production code writes the events. */
import { issueAuditKey, revokeAuditKey } from '#audit';
import type { Actor, Position } from '#eventstore';
import { Deadline, type ServiceError, timestamp } from '#kernel';
import { adjustBooks, closePeriod, journalModel, remit, reverseRemittance } from '#ledger';
import { acknowledgeStaffTask, resolvePayment, reverseByStaff, finishCreate, staff } from '#payments';
import { freePort } from '#platform';
import { erase } from '#privacy';
import { changeException, paymentRegisterModel, recordBatch, recordSettlements, sendRefund } from '#settlement';
import { createResolve, createSender, Endpoints, postgresStaffTables, redeliverAllHeld } from '#webhooks';
import { dispute } from './books.js';
import { CARD_FORM, checkoutPortal, formText, INTAKE, intakeOf, LINES, Payer, type Portal, SHOP, signedFields } from './checkout.js';
import { eventually } from './eventually.js';
import { startNameServer } from './name-server.js';
import { CARD, paymentOf, type Service, startService, type TestAccount } from './service.js';
import { settlementDesk } from './settlement.js';

const PUBLIC = 'https://pay.riverton.example';
const HOOK = 'hooks.riverton.example';
const ACTOR: Actor = { type: 'operator', id: 'dana' };
const BY = 'Dana Scott';
const HOUR_MS = 3_600_000;
const DAY_MS = 24 * HOUR_MS;

/** Event types that this release does not write. `PostingRuleChanged` needs a second version of a rule. */
export const NOT_WRITTEN_YET: readonly string[] = ['PostingRuleChanged'];

export const startWithEveryEvent = async (): Promise<Service> => {
  const names = await startNameServer();
  names.answer(HOOK, ['127.0.0.1']);
  // Nothing listens at this address, so every delivery fails and is held.
  const port = await freePort();
  const env = { WEBHOOK_PRIVATE_TARGETS: `${HOOK}:${port}=127.0.0.1/32`, WEBHOOK_DNS_SERVERS: names.address, WEBHOOK_RETRY_SECONDS: '0.1' };
  const service = await startService({ publicUrl: PUBLIC, env }).catch((error: unknown) => {
    names.close();
    throw error;
  });
  const stop = async () => {
    await service.stop();
    names.close();
  };
  try {
    const partner = await service.account('Riverton Billing');
    const webhooks = await listenTo(service, partner, `https://${HOOK}:${port}/payments`);
    await administer(service);
    const rejected = await pay(service, partner);
    await redeliverHeld(service, webhooks);
    await settleAll(service, partner);
    const task = { paymentId: rejected, task: 'settlement_rejected', reason: 'paid at the counter', by: BY } as const;
    await acknowledgeStaffTask(service.services.payments.ports, service.services.store, task);
    await checkOut(service, partner);
    await closeBooks(service, await service.portal(partner));
    return { ...service, stop };
  } catch (error) {
    await stop();
    throw error;
  }
};

const administer = async (service: Service): Promise<void> => {
  const { admin, services } = service;
  const { accountId } = await service.account('Riverton Utilities');
  await admin.rotateKeys(accountId);
  await admin.revokeKey(accountId, (await admin.issueKey(accountId)).keyId);
  const partner = (await admin.createAccount('Riverton Parking')).state;
  const portal = (
    await admin.createPortal({
      accountIds: [accountId],
      name: 'Riverton Water',
      gateway: 'simulator',
      fee: { flatCents: 50, percentBps: 250, minCents: 0, maxCents: 2_500, chargeMode: 'separate' },
    })
  ).state.portalId;
  await admin.changeFee(portal, { percentBps: 275 });
  await admin.grantAccess(portal, partner.accountId);
  await admin.revokeAccess(portal, partner.accountId);
  await admin.deactivateAccount(partner.accountId);
  await admin.reactivateAccount(partner.accountId);
  await admin.setRetention(accountId, 7);
  await admin.setLimits(portal, 'card', { attempts: null, declines: 3, windowSeconds: 3_600, blockSeconds: 1_800 });
  await admin.setRules(portal, { minCents: 100, maxCents: 500_000, brands: ['visa', 'mastercard'] });
  await admin.setCoding(portal, ['fund', 'gl']);
  await admin.configureCheckout(portal, { enabled: true, allow: [`${SHOP}/pay`], agencyName: 'City of Riverton', colour: '#0b5fff', locale: 'en' });
  await admin.stageSigningSecret(portal);
  await admin.activateSigningSecret(portal);
  const settings = { cutOff: { time: '16:00', timeZone: 'America/Los_Angeles' }, endpoint: null };
  const water = { merchantAccount: 'riverton-water', gateway: 'authorize-net', environment: 'sandbox', name: 'Riverton Water', settings } as const;
  await admin.addMerchantAccount(water, '700001', '{"apiLoginId":"riverton","transactionKey":"4f2a9c"}', []);
  await admin.rotateCredentials('riverton-water', '700001', '{"apiLoginId":"riverton","transactionKey":"77be01"}');
  await admin.changeMerchantSettings('riverton-water', { cutOff: { time: '17:30', timeZone: 'America/Los_Angeles' } });
  await admin.disableMerchantAccount('riverton-water', 'charges', 'the key was seen in a ticket');
  await admin.enableMerchantAccount('riverton-water');
  await admin.recordMerchantCheck('riverton-water', services.ids.uuid(), [{ guarantee: 'g1', result: 'holds', detail: 'clock 0.2 s off' }]);
  await admin.setGateway(portal, { gateway: 'authorize-net', principal: 'riverton-water', fee: 'riverton-water' });
  await admin.setGateway(portal, 'none');
  const until = timestamp(service.clock.now() + DAY_MS);
  const restrict = (kind: 'block' | 'hold' | 'allow', reason: string | null) =>
    admin.restrictCase({ portalId: portal, referenceId: 'CASE-7', kind, until: kind === 'hold' ? until : null, reason });
  await restrict('block', 'court order 12/2026');
  await restrict('hold', 'the amount is under review');
  await service.administer(restrict('allow', null));
  const { store, pool: db, clock, ids, keys, config } = services;
  const ports = { store, db, clock, ids, keys, environment: config.environment };
  const { keyId } = await issueAuditKey(ports, { name: 'Reconciliation job', role: 'finance', scope: null, personal: false }, ACTOR);
  await revokeAuditKey(ports, keyId, ACTOR);
};

/** Makes payments with every outcome that needs no batch. */
/** Returns the payment whose settlement will be rejected. */
const pay = async (service: Service, partner: TestAccount): Promise<string> => {
  const { client } = partner;
  const { payments } = service.services;
  const portal = await service.portal(partner, { fee: { flatCents: 300 } });
  await service.administer(service.admin.setCoding(portal, ['fund', 'gl']));
  const payer = {
    firstName: 'Alex',
    lastName: 'Rivera',
    email: 'alex@mail.example',
    phone: '+1 555 0100',
    address: { line1: '1 Main Street', city: 'Riverton', state: 'CA', zip: '90001', country: 'US' },
  };
  const lineItems = [
    { amountCents: 6_000, referenceId: 'WTR-2041', description: 'Water', metadata: { ward: 4, meters: ['A-17', 'A-18'], fund: '402' } },
    { amountCents: 4_000, referenceId: 'WTR-2042' },
  ];
  const body = (number: string = CARD.approved) => paymentOf(portal, { number, lineItems, referenceId: 'CASE-7', payer });
  const created = async (number?: string) => (await client.created(body(number))).id;
  const failed = async (number: string) => (await client.create(body(number))).details?.id as string;

  const voided = await created();
  await client.void(voided, { reason: 'entered twice' });
  await erase(service.services.privacy, { chosen: { payments: [voided] }, reasonCode: 'request', by: BY, apply: true });
  await failed(CARD.declined);
  await failed(CARD.gatewayError);
  await service.recover(await failed(CARD.unreadable));
  const resolve = { as: 'voided', evidence: 'call with the bank, 14:20', by: BY, force: false, transactions: {} } as const;
  await resolvePayment(payments.ports, service.services.settlement.register, { ...resolve, paymentId: await failed(CARD.neverReached) });

  // The outcome of this refund is unknown until recovery finds it. The repeated command then gets the refund's result.
  const refunded = await created(CARD.settlesAtOnce);
  for (const call of ['refund', 'lookup', 'finalize'] as const) await service.simulator.arm({ match: { call }, answer: 'cut', times: null });
  const refund = { operation: 'refund', paymentId: refunded, amountCents: 10_000, includeFee: false, reason: 'billed twice', by: BY } as const;
  const ended = await reverseByStaff(payments, refund, null).catch((error: unknown) => (error as ServiceError).code);
  if (ended !== 'PAYMENT_TIMEOUT') throw new Error(`the outcome of the refund is not unknown: ${JSON.stringify(ended)}`);
  await service.simulator.clearFaults();
  await service.recover(refunded);
  await reverseByStaff(payments, refund, null);
  await reverseByStaff(payments, { ...refund, amountCents: null, includeFee: true }, null);

  // Finish a create like the key sweeper after a process died before recording the intent.
  const { clock, ids } = service.services;
  const sweeper = { actor: { type: 'recovery' as const, id: 'key-sweeper' }, correlationId: ids.uuid() };
  await finishCreate(
    payments.ports,
    { paymentId: ids.uuid(), attemptId: ids.uuid(), claimedAt: timestamp(clock.now()), begun: false },
    partner.accountId,
    sweeper,
    new Deadline(clock, 5_000),
  );
  // The log has lost an intent, and no gateway can tell.
  const blind = { ...payments.ports, gateways: { find: () => null } };
  const lost = { paymentId: ids.uuid(), attemptId: ids.uuid(), claimedAt: timestamp(clock.now()), begun: null };
  await finishCreate(blind, lost, partner.accountId, sweeper, new Deadline(clock, 5_000));

  return created(CARD.settlementRejected);
};

/** Makes batches from the processor's interface, settlement files that contradict them, and exceptions. */
const settleAll = async (service: Service, partner: TestAccount): Promise<void> => {
  const { services, simulator } = service;
  const desk = settlementDesk(service);
  const record = () => recordSettlements(services.settlement, AbortSignal.timeout(20_000));
  try {
    const portal = await service.portal(partner, { fee: { flatCents: 300 } });
    const sale = async () => (await partner.client.created(paymentOf(portal))).id;
    await simulator.closeBatches();
    await record();
    const disputed = await sale();
    await simulator.closeBatches();
    await record();
    await dispute(service, disputed, 4_000, 'debited', 'lost');
    // A batch settles a payment whose outcome is unknown. Staff send its money back.
    const unknown = (await partner.client.create(paymentOf(portal, { number: CARD.unresolvable }))).details?.id as string;
    await simulator.closeBatches();
    await record();
    const settled = (await desk.exceptions()).find(({ paymentId }) => paymentId === unknown)!;
    const back = { exceptionId: settled.exceptionId, reason: 'settled, but unknown here', by: BY, last4: null };
    await sendRefund(services.settlement, back, staff(BY, services.ids.uuid()));
    // Somebody voids a charge at the processor's own page. A worker finds it a day later.
    const elsewhere = await desk.transaction(await sale());
    const cards = (await services.settlement.register.accounts()).find((one) => one.merchantAccount === elsewhere.merchantAccount)!;
    const call = { account: cards, leg: 'principal', begunAt: new Date(service.clock.now()).toISOString(), askedBy: 'void' } as const;
    const page = { ...call, ref: 'own-page-1', chargeTransactionId: elsewhere.transactionId };
    await services.payments.ports.gateways.find(cards)!.void(page, AbortSignal.timeout(20_000));
    // Move to a day on which the processor has funded these batches.
    service.clock.advance(5 * DAY_MS);
    await record();

    // The file of the next batch arrives before the interface lists that batch. The file has one line more.
    const [stays, goes] = [await desk.transaction(await sale()), await desk.transaction(await sale())];
    // Prevent the worker from recording the batch from the interface first.
    await simulator.arm({ match: { call: 'batches' }, answer: 'disabled', times: null });
    const batch = (await simulator.closeBatches()).find(({ merchantAccount }) => merchantAccount === stays.merchantAccount)!;
    const line = (transactionId: string, gross: number, fee: number) =>
      desk.line(batch.batchId, transactionId, { closed: batch.closedAt, gross, fee });
    const [one, two, strange] = [line(stays.transactionId, 10_000, 230), line(goes.transactionId, 10_000, 230), line('tx_unknown', 700, 0)];
    await desk.importFile(desk.csv(one, two, strange));
    await simulator.clearFaults();
    await record();
    const { exceptionId } = (await desk.exceptions()).find(({ transactionId }) => transactionId === 'tx_unknown')!;
    const change = (command: Parameters<typeof changeException>[2]) =>
      changeException(services.settlement, exceptionId, command, staff(BY, services.ids.uuid()));
    await change({ type: 'Assign', to: 'Robin Lee', by: BY });
    await change({ type: 'Explain', reason: 'terminal of another city', by: 'Robin Lee' });
    await change({ type: 'Resolve', resolution: 'adopt', reason: 'paid at the counter', by: BY, portalId: portal, feeCents: 0 });
    // The processor says that a refund which was made here has failed.
    await services.settlement.register.caughtUp();
    const { rows } = await services.pool.query<Record<'gateway' | 'merchant_account' | 'transaction_id' | 'ref', string>>(
      `select * from gateway_transaction where op = 'refund' and exception_id is null and moved_at is not null and transaction_id is not null limit 1`,
    );
    const refund = rows[0]!;
    const account = (await services.settlement.register.accounts()).find((one) => one.merchantAccount === refund.merchant_account)!;
    const failure = { transactionId: refund.transaction_id, ref: refund.ref, type: 'refund_failure', accepted: true, grossCents: 100, feeCents: 0, netCents: 100 } as const; // prettier-ignore
    const lines = (async function* () {
      yield failure;
    })();
    await recordBatch(services.settlement, account, { batchId: 'failures', closedAt: batch.closedAt, fundedOn: null, lines }, null, AbortSignal.timeout(20_000)); // prettier-ignore
    // Two corrected files: the first removes a sale and adds a line, the second removes the added line.
    await desk.importFile(desk.csv(one, strange, line('tx_late', 300, 0)));
    await desk.exceptions();
    await desk.importFile(desk.csv(one, strange));
    await desk.exceptions();
    // The batch is funded today. Then a file says that the money comes tomorrow.
    for (const days of [0, 1]) {
      const fundedOn = timestamp(service.clock.now() + days * DAY_MS).slice(0, 10);
      await desk.importFile(desk.csv(`${one}${fundedOn}`, `${strange}${fundedOn}`));
    }
  } finally {
    desk.close();
  }
};

/** Makes checkout sessions with every outcome. */
const checkOut = async (service: Service, partner: TestAccount): Promise<void> => {
  const portal = await checkoutPortal(service, partner);
  const payer = () => new Payer(service.urls[0]!, PUBLIC);
  const fields = (more: Readonly<Record<string, string>> = {}) =>
    intakeOf(portal, { payer_first_name: 'Alex', payer_last_name: 'Rivera', payer_email: 'alex@mail.example', ...more });

  // The partner's server starts the session, and the payer opens it. The first card is declined, the second one pays.
  const body = JSON.stringify({ ...fields(), amount_cents: 12_500, line_items: LINES });
  const begun = await payer().send(INTAKE, { method: 'POST', body, headers: { 'content-type': 'application/json', origin: null } });
  const opened = payer();
  const id = new URL(begun.location).pathname.split('/').at(-1)!;
  await opened.pay(id, { card_number: CARD.declined });
  await opened.pay(id, CARD_FORM);

  const unknown = payer();
  const left = await unknown.begin(fields());
  await unknown.pay(left, { card_number: CARD.unreadable });
  service.clock.advance(31_000);
  await unknown.leave(left, 'done');

  const cancelled = payer();
  await cancelled.leave(await cancelled.begin(fields()), 'cancel');

  const expired = payer();
  const link = linkOf(portal, service.clock.now());
  const { location } = await expired.send(link);
  service.clock.advance(HOUR_MS + 60_000);
  await expired.send(link);
  service.clock.advance(HOUR_MS + 60_000);
  await expired.leave(location.split('/').at(-1)!, 'cancel');
};

const linkOf = ({ portalId, signingSecret }: Portal, nowMs: number): string => {
  const fields = intakeOf({ portalId }, { nonce: 'riverton-2026-000017', exp: String(Math.floor((nowMs + 5 * HOUR_MS) / 1_000)) });
  return `${INTAKE}/link?${formText(signedFields(signingSecret, 'link', `${PUBLIC}${INTAKE}/link`, fields))}`;
};

const webhookDeps = ({ services: { pool, store, clock, ids } }: Service) => ({ tables: postgresStaffTables(pool), store, clock, ids, actor: ACTOR });

const listenTo = async (
  service: Service,
  { accountId }: TestAccount,
  url: string,
): Promise<{ readonly endpoints: Endpoints; readonly endpointId: string }> => {
  const { config, clock, keys } = service.services;
  const sender = createSender({ settings: config.webhooks, resolve: createResolve(config.webhooks.dnsServers, clock), clock });
  const endpoints = new Endpoints({ ...webhookDeps(service), keys, sender });
  const { endpointId } = await endpoints.add(accountId, url, 'Riverton Billing');
  await endpoints.stageSecret(endpointId);
  await endpoints.activateSecret(endpointId);
  await endpoints.pause(endpointId);
  await endpoints.resume(endpointId);
  return { endpoints, endpointId };
};

const redeliverHeld = async (service: Service, { endpoints, endpointId }: Awaited<ReturnType<typeof listenTo>>): Promise<void> => {
  await eventually(async () => (await redeliverAllHeld(webhookDeps(service))).length > 0);
  await endpoints.disable(endpointId);
};

/** Makes an adjustment and a remittance, takes the remittance back, and closes a period. */
const closeBooks = async (service: Service, portalId: string): Promise<void> => {
  const { store, pool: db, clock, ids, readModels } = service.services;
  const journalReached = (position: Position) => readModels.of(journalModel).runUntil(position, { timeoutMs: 20_000 });
  const ports = { store, db, clock, ids, journalReached };
  const now = timestamp(clock.now());
  const postings = [
    { account: 'assets:bank:operating', cents: 700 },
    { account: 'equity:adjustment', cents: -700 },
  ];
  await adjustBooks(ports, { adjustmentId: ids.uuid(), postings, effectiveAt: now, reason: 'interest of the bank', by: BY });
  const registerReached = (position: Position) => readModels.of(paymentRegisterModel).runUntil(position, { timeoutMs: 20_000 });
  const remittance = { remittanceId: ids.uuid(), portalId, on: null, by: BY };
  await remit({ ...ports, registerReached }, { ...remittance, cents: 2_500, reference: 'WIRE-2026-0417', advance: true });
  await reverseRemittance({ ...ports, registerReached }, { ...remittance, reason: 'came back: account closed' });
  await closePeriod(ports, `${now.slice(0, 10)}T00:00:00.000Z`, BY);
};
