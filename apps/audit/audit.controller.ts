/** `/audit/v1/*`: the read-only API for finance tools and auditors. Every answer names the log position up to which it is complete. */
import {
  applyDecorators,
  type CanActivate,
  Controller,
  createParamDecorator,
  type ExecutionContext,
  Get,
  Inject,
  Injectable,
  Param,
  Query,
  Res,
  SetMetadata,
  UseGuards,
  UseInterceptors,
} from '@nestjs/common';
import { Reflector } from '@nestjs/core';
import { ApiExtension, ApiOperation, ApiParam, ApiQuery, ApiResponse, ApiSecurity, ApiTags } from '@nestjs/swagger';
import type { FastifyReply, FastifyRequest } from 'fastify';
import { portalNotFound, refuseForeignPortal, type Scope } from '#accounts';
import { checkpointOf, eventsBetween, type Position, postgresCheckpoint, projectionPlace, type ReadModel } from '#eventstore';
import { AuthenticationError, isUuid, ServiceError } from '#kernel';
import {
  type AuditCaller,
  authenticateAudit,
  changedPayments,
  driftFound,
  eventPage,
  type ExportManifest,
  exceptionsFor,
  exportReport,
  feedTypes,
  FeedWaits,
  FIND_PARAMETERS,
  findAlerts,
  findFaults,
  findPayments,
  isPlaceIn,
  isReport,
  listAsOf,
  MAX_WAIT_SECONDS,
  nameHashOf,
  NOTHING_KNOWN,
  openPlace,
  outOfScope,
  paymentAsOf,
  paymentFindModel,
  type Reader,
  readerOf,
  refuseReport,
  REPORTS,
  reportOf,
  sealPlace,
  statementCsv,
  statementOf,
  timeline,
  withoutStaffNames,
} from '#audit';
import { balances, bookSumCents, journalModel, journalPage, lineRegisterModel } from '#ledger';
import { batchesAsOf, EXCEPTION_STATUSES, type ExceptionStatus, exceptionModel, paymentRegisterModel } from '#settlement';
import { listRefusals, paymentListModel, PAYMENT_STATUSES, type PaymentStatus, staffWorkModel, storeIncident } from '#payments';
import { collect, successAnswer } from '#platform';
import { headerLines, sendAnswer, validationError } from '#platform/http';
import { instantOf } from '../api/partner/requests.js';
import { ErrorEnvelope } from '../api/partner/resources.js';
import type { Services } from '../services.js';
import { AUDITED, CutOff, Download, LimitRunning, type MetLimit, ON_LIMIT, Pace } from './limits.js';

type AuditRequest = FastifyRequest & { auditor?: AuditCaller };

const IS_SCOPED = Symbol('is scoped');
/** A key with a scope gets its own part from this route. All other routes answer such a key with 403. */
const Scoped = () => applyDecorators(SetMetadata(IS_SCOPED, true), ApiExtension('x-scope', 'filtered'));
/** A key with a scope gets 403, since the answer is not divided by account or portal. */
const NotScoped = () => ApiExtension('x-scope', 'refused');

@Injectable()
export class AuditGuard implements CanActivate {
  constructor(
    @Inject(AUDITED) private readonly services: Services,
    @Inject(Reflector) private readonly reflector: Reflector,
  ) {}

  async canActivate(context: ExecutionContext): Promise<boolean> {
    const request = context.switchToHttp().getRequest<AuditRequest>();
    const { pool, keys, config } = this.services;
    request.auditor = await authenticateAudit(headerLines(request.raw.rawHeaders, 'authorization'), {
      db: pool,
      keys,
      environment: config.environment,
    });
    const isScoped = this.reflector.get<boolean | undefined>(IS_SCOPED, context.getHandler()) === true;
    if (request.auditor.scope !== null && !isScoped) throw outOfScope();
    return true;
  }
}

const AuditorOf = createParamDecorator(
  (_: unknown, context: ExecutionContext): AuditCaller => context.switchToHttp().getRequest<AuditRequest>().auditor!,
);

const LEDGER_HEADERS = {
  'Ledger-Position': { description: 'Place in the log up to which the answer is complete', schema: { type: 'string' as const } },
  'Ledger-Lag': { description: 'Events after it; 0: everything that had happened when the request arrived', schema: { type: 'string' as const } },
};
/** Documents an answer: the envelope around an object with these fields, and other forms of it by their media type. */
const Answers =
  (fields: Record<string, object>, otherForms: Record<string, object> = {}): MethodDecorator =>
  (target, property, descriptor) => {
    const schema = {
      type: 'object',
      required: ['success', 'data'],
      properties: {
        success: { type: 'boolean' },
        data: { type: 'object', required: Object.keys(fields), properties: fields },
      },
    };
    const content = { 'application/json': { schema }, ...otherForms };
    ApiResponse({ status: 200, headers: LEDGER_HEADERS, content })(target, property, descriptor);
    for (const status of [400, 401, 403, 404, 500, 503]) ApiResponse({ status, type: ErrorEnvelope })(target, property, descriptor);
  };
const TEXT = { type: 'string' };
const OBJECT = { type: 'object' };
const CENTS = { type: 'integer' };
const LIST = { type: 'array', items: OBJECT };
const AsOf = () =>
  ApiQuery({ name: 'asOf', required: false, description: 'As it was known then: RFC 3339 with offset, or a day', schema: { type: 'string' } });
const Text = (name: string, description = '') => ApiQuery({ name, required: false, description, schema: { type: 'string' } });

const MAX_REFERENCE = 255;
const MAX_ROWS = 1_000;
const DEFAULT_ROWS = 100;

type Values = Readonly<Record<string, unknown>>;

/** Returns the parameters as text. Refuses unknown parameters and parameters that are given twice. */
const known = <Name extends string>(query: Values, ...names: readonly Name[]): Partial<Record<Name, string>> => {
  const faults = Object.entries(query).flatMap(([field, value]) => {
    if (!names.includes(field as Name)) return [{ field, message: 'is no parameter here' }];
    return typeof value === 'string' ? [] : [{ field, message: 'must be given once' }];
  });
  if (faults.length > 0) throw validationError(faults);
  return query as Partial<Record<Name, string>>;
};
const fault = (field: string, message: string) => validationError([{ field, message }]);
const time = (field: string, value: string | undefined): string | null => {
  if (value === undefined) return null;
  const instant = instantOf(value);
  if (instant === null) throw fault(field, 'must be RFC 3339 with offset, or YYYY-MM-DD');
  return new Date(instant).toISOString();
};
const uuid = (field: string, value: string | undefined): string | null => {
  if (value === undefined) return null;
  if (!isUuid(value)) throw fault(field, 'must be a UUID');
  return value.toLowerCase();
};
const reference = (value: string | undefined): string | null => {
  // Postgres stores no NUL, so no row has one.
  if (value !== undefined && (value === '' || value.length > MAX_REFERENCE || value.includes('\0')))
    throw fault('referenceId', `must be 1 to ${MAX_REFERENCE} characters`);
  return value ?? null;
};
const count = (value: string | undefined): number => {
  if (value === undefined) return DEFAULT_ROWS;
  if (!/^[1-9]\d{0,3}$/.test(value) || Number(value) > MAX_ROWS) throw fault('limit', `must be 1 to ${MAX_ROWS}`);
  return Number(value);
};
const waitOf = (value: string | undefined): number => {
  if (value === undefined) return 0;
  if (!/^\d{1,2}$/.test(value) || Number(value) > MAX_WAIT_SECONDS) throw fault('wait', `must be 0 to ${MAX_WAIT_SECONDS} seconds`);
  return Number(value);
};
/** True if the caller asks for personal data and may read it. Throws 403 if its key was not issued for that. */
const opens = (caller: AuditCaller, value: string | undefined): boolean => {
  if (value === undefined) return false;
  if (value !== 'true') throw fault('personal', 'must be true');
  if (!caller.personal) throw new AuthenticationError(403, 'This key may not read personal data.');
  return true;
};
const Personal = () => Text('personal', 'true: personal data too, for a key that was issued with --personal');

const paymentIdOf = (id: string): string => {
  if (!isUuid(id)) throw new ServiceError('PAYMENT_NOT_FOUND', 'Payment not found.');
  return id.toLowerCase();
};

@UseGuards(AuditGuard)
@UseInterceptors(LimitRunning)
@ApiSecurity('auditKey')
@ApiTags('Audit')
@Controller('audit/v1')
export class AuditController {
  constructor(
    @Inject(AUDITED) private readonly services: Services,
    @Inject(ON_LIMIT) private readonly onLimit: (limit: MetLimit) => void,
    @Inject(Pace) private readonly pace: Pace,
    @Inject(LimitRunning) private readonly running: LimitRunning,
    @Inject(FeedWaits) private readonly waits: FeedWaits,
  ) {}

  /** In an incident of the event store, a payment that is not found may be lost (C76). */
  private async orMayBeLost<T>(finding: Promise<T>): Promise<T> {
    return finding.catch((error: unknown) => {
      const isLost = error instanceof ServiceError && error.code === 'PAYMENT_NOT_FOUND' && this.services.ownLog.incident !== null;
      throw isLost ? storeIncident() : error;
    });
  }

  @Get('payments/:id')
  @Scoped()
  @ApiOperation({ summary: 'A payment, now or as it was', operationId: 'auditPayment' })
  @ApiParam({ name: 'id', schema: { type: 'string', format: 'uuid' } })
  @AsOf()
  @Text('revision', 'After its event of this number, from 0')
  @Text('position', 'At this place of the log')
  @Personal()
  @Answers({ payment: OBJECT, revision: { type: 'integer' }, position: TEXT })
  async payment(@AuditorOf() caller: AuditCaller, @Param('id') id: string, @Query() query: Values, @Res() reply: FastifyReply): Promise<void> {
    const { asOf, revision, position, personal } = known(query, 'asOf', 'revision', 'position', 'personal');
    const open = opens(caller, personal);
    if (revision !== undefined && !/^\d{1,9}$/.test(revision)) throw fault('revision', 'must be a whole number');
    if (position !== undefined && !isPlaceIn(await this.services.store.head(), position))
      throw fault('position', 'must be a position of this log, as its answers show it');
    // The payment is folded from its own stream, so the answer has no lag.
    await this.complete(reply);
    const until = { asOf: time('asOf', asOf) ?? undefined, revision: revision === undefined ? undefined : BigInt(revision), position };
    const paymentId = paymentIdOf(id);
    const found = await this.reading(caller, open, `payments/${paymentId}`, (reader) =>
      this.orMayBeLost(paymentAsOf(this.services.store, caller.scope, paymentId, until, reader)),
    );
    sendAnswer(reply, successAnswer(found));
  }

  @Get('payments/:id/timeline')
  @Scoped()
  @ApiOperation({ summary: 'Every event of a payment: who, when, under which rules, with the gateway’s evidence', operationId: 'auditTimeline' })
  @ApiParam({ name: 'id', schema: { type: 'string', format: 'uuid' } })
  @AsOf()
  @Personal()
  @Answers({ events: LIST })
  async timeline(@AuditorOf() caller: AuditCaller, @Param('id') id: string, @Query() query: Values, @Res() reply: FastifyReply): Promise<void> {
    const { asOf, personal } = known(query, 'asOf', 'personal');
    const open = opens(caller, personal);
    await this.complete(reply);
    const until = { asOf: time('asOf', asOf) ?? undefined };
    const paymentId = paymentIdOf(id);
    const events = await this.reading(caller, open, `payments/${paymentId}/timeline`, (reader) =>
      this.orMayBeLost(timeline(this.services.store, caller.scope, paymentId, until, { reader })),
    );
    sendAnswer(reply, successAnswer({ events: caller.role === 'auditor' ? events : events.map(withoutStaffNames) }));
  }

  @Get('payments')
  @Scoped()
  @ApiOperation({
    summary: 'Payments of all accounts, now or as they were, newest first',
    description:
      'Finds by one of `lineReference`, `referenceId`, `confirmationNumber`, `transactionId`, or `last4` with `amountCents`, if one is given. ' +
      'A value must match exactly. The other filters count too.',
    operationId: 'auditPayments',
  })
  @Text('lineReference', 'Reference of a line item')
  @Text('referenceId', 'Reference of the payment')
  @Text('confirmationNumber')
  @Text('transactionId', 'The processor’s id of a charge, void or refund of the payment, or of a settlement line')
  @Text('last4', 'Last four digits of the card, with `amountCents`')
  @Text('amountCents', 'With `last4`: the principal, or the total charged')
  @AsOf()
  @Text('accountId')
  @Text('portalId')
  @Text('from')
  @Text('to')
  @Text('status')
  @Text('cursor')
  @Text('limit')
  @Personal()
  @Answers({ payments: LIST, nextCursor: { type: ['string', 'null'] } })
  async payments(@AuditorOf() caller: AuditCaller, @Query() query: Values, @Res() reply: FastifyReply): Promise<void> {
    const { keyId, scope } = caller;
    const { asOf, accountId, portalId, from, to, status, cursor, limit, personal, ...by } = known(
      query,
      'asOf',
      'accountId',
      'portalId',
      'from',
      'to',
      'status',
      'cursor',
      'limit',
      'personal',
      ...FIND_PARAMETERS,
    );
    const open = opens(caller, personal);
    if (status !== undefined && !PAYMENT_STATUSES.includes(status as PaymentStatus))
      throw fault('status', `must be one of ${PAYMENT_STATUSES.join(', ')}`);
    const faults = findFaults(by);
    if (faults.length > 0) throw validationError(faults);
    const nameHash = nameHashOf(by);
    const filters = {
      asOf: time('asOf', asOf),
      accountId: uuid('accountId', accountId),
      portalId: uuid('portalId', portalId),
      from: time('from', from),
      to: time('to', to),
      status: (status as PaymentStatus | undefined) ?? null,
      limit: count(limit),
    };
    const { store, pool: db, ownLog } = this.services;
    if (nameHash === null) {
      const places = this.places(keyId, 'payments');
      const after = cursor === undefined ? null : timedPlace(places.open(cursor));
      await refuseForeignPortal(db, scope, filters.portalId);
      await this.standing(reply, paymentListModel);
      const { payments, next } = await this.reading(caller, open, 'payments', (reader) =>
        listAsOf({ store, db }, scope, { ...filters, after }, reader),
      );
      return sendAnswer(reply, successAnswer({ payments, nextCursor: next && places.seal(`${next.createdAt} ${next.id}`) }));
    }
    // The place of a find is the id of the last payment of the page before.
    const places = this.places(keyId, 'find');
    const after = cursor === undefined ? null : places.open(cursor);
    await refuseForeignPortal(db, scope, filters.portalId);
    await this.standing(reply, paymentFindModel, ...modelsOf(scope));
    const { payments, next } = await this.reading(caller, open, 'payments', (reader) =>
      findPayments({ store, db }, scope, { ...NOTHING_KNOWN, ...filters, nameHashes: [nameHash], after }, reader),
    );
    // In an incident of the event store, a payment that is not found may be lost (C76).
    if (payments.length === 0 && ownLog.incident !== null) throw storeIncident();
    sendAnswer(reply, successAnswer({ payments, nextCursor: next && places.seal(next) }));
  }

  @Get('refusals')
  @NotScoped()
  @ApiOperation({ summary: 'Charges that a case, a rule or a limit refused, newest first, of the last 90 days', operationId: 'auditRefusals' })
  @Text('portalId')
  @Text('referenceId')
  @Text('from')
  @Text('to')
  @Text('cursor')
  @Text('limit')
  @Answers({ refusals: LIST, nextCursor: { type: ['string', 'null'] } })
  async refusals(@AuditorOf() { keyId }: AuditCaller, @Query() query: Values, @Res() reply: FastifyReply): Promise<void> {
    const { portalId, referenceId, from, to, cursor, limit } = known(query, 'portalId', 'referenceId', 'from', 'to', 'cursor', 'limit');
    const places = this.places(keyId, 'refusals');
    const place = cursor === undefined ? null : timedPlace(places.open(cursor));
    // The rows do not come from the log, so they have no lag behind it.
    await this.complete(reply);
    const { refusals, next } = await listRefusals(this.services.pool, {
      portalId: uuid('portalId', portalId),
      referenceId: reference(referenceId),
      from: time('from', from),
      to: time('to', to),
      after: place && { refusedAt: place.createdAt, id: place.id },
      limit: count(limit),
    });
    sendAnswer(reply, successAnswer({ refusals, nextCursor: next && places.seal(`${next.refusedAt} ${next.id}`) }));
  }

  @Get('ledger/balances')
  @NotScoped()
  @ApiOperation({ summary: 'Balances of all accounts of the books', operationId: 'auditBalances' })
  @AsOf()
  @Text('effectiveTo', 'Only what had taken effect before then')
  @Answers({ accounts: LIST, sumCents: { type: 'integer' } })
  async balances(@Query() query: Values, @Res() reply: FastifyReply): Promise<void> {
    const { asOf, effectiveTo } = known(query, 'asOf', 'effectiveTo');
    await this.standing(reply, journalModel);
    const accounts = await balances(this.services.pool, { asOf: time('asOf', asOf), effectiveTo: time('effectiveTo', effectiveTo) });
    sendAnswer(reply, successAnswer({ accounts, sumCents: bookSumCents(accounts) }));
  }

  @Get('ledger/journal')
  @NotScoped()
  @ApiOperation({ summary: 'Entries of the journal after a place, in the order of the log', operationId: 'auditJournal' })
  @Text('after', '`next` of the page before')
  @Text('from', 'Booked from then on')
  @Text('to', 'Booked before then')
  @Text('limit')
  @Answers({ entries: LIST, next: { type: ['string', 'null'] } })
  async journal(@Query() query: Values, @Res() reply: FastifyReply): Promise<void> {
    const { after, from, to, limit } = known(query, 'after', 'from', 'to', 'limit');
    const [, position = '', number = '-1'] = /^([\d:]{0,41})\/(\d{1,6})$/.exec(after ?? '') ?? [];
    if (after !== undefined && position === '') throw fault('after', 'must be the next of a page before');
    const until = await this.standing(reply, journalModel);
    const size = count(limit);
    const place = { position, number: Number(number) };
    const entries = until === null ? [] : await journalPage(this.services.pool, place, { from: time('from', from), to: time('to', to), until }, size);
    const last = entries.length === size ? entries.at(-1)! : null;
    sendAnswer(reply, successAnswer({ entries, next: last && `${last.position}/${last.number}` }));
  }

  @Get('drift')
  @NotScoped()
  @ApiOperation({ summary: 'What the continuous comparison of replay, list, journal and settlement has found', operationId: 'auditDrift' })
  @Answers({ payments: { type: 'integer' }, completedAt: { type: ['string', 'null'] }, differences: LIST })
  async drift(@Query() query: Values, @Res() reply: FastifyReply): Promise<void> {
    known(query);
    await this.standing(reply, journalModel);
    sendAnswer(reply, successAnswer(await driftFound(this.services.pool)));
  }

  @Get('alerts')
  @NotScoped()
  @ApiOperation({
    summary: 'What waits for people too long, and what does not agree',
    description: 'Every alert has a row. It fires if `count` is more than 0. `items` are the oldest, at most 20.',
    operationId: 'auditAlerts',
  })
  @Answers({ alerts: LIST })
  async alerts(@Query() query: Values, @Res() reply: FastifyReply): Promise<void> {
    known(query);
    await this.standing(reply, exceptionModel, paymentRegisterModel, paymentListModel, journalModel, staffWorkModel);
    const { store, pool: db, clock } = this.services;
    sendAnswer(reply, successAnswer({ alerts: await findAlerts({ store, db, nowMs: clock.now(), thresholds: this.services.config.alerts }) }));
  }

  @Get('exceptions')
  @Scoped()
  @ApiOperation({ summary: 'Exceptions of settlement', operationId: 'auditExceptions' })
  @Text('status', 'opened, assigned, explained, resolved or superseded')
  @Answers({ exceptions: LIST })
  async exceptions(@AuditorOf() caller: AuditCaller, @Query() query: Values, @Res() reply: FastifyReply): Promise<void> {
    const { status } = known(query, 'status');
    if (status !== undefined && !EXCEPTION_STATUSES.includes(status as ExceptionStatus))
      throw fault('status', `must be one of ${EXCEPTION_STATUSES.join(', ')}`);
    await this.standing(reply, exceptionModel, ...modelsOf(caller.scope));
    const { pool, clock } = this.services;
    sendAnswer(reply, successAnswer({ exceptions: await exceptionsFor(pool, caller, { status: status ?? null, now: clock.now() }) }));
  }

  @Get('batches')
  @NotScoped()
  @ApiOperation({ summary: 'Settlement batches, now or as they were known', operationId: 'auditBatches' })
  @AsOf()
  @Answers({ batches: LIST })
  async batches(@Query() query: Values, @Res() reply: FastifyReply): Promise<void> {
    const { asOf } = known(query, 'asOf');
    await this.standing(reply, paymentRegisterModel);
    const batches = await collect(batchesAsOf(this.services.pool, time('asOf', asOf), this.services.clock.now()));
    sendAnswer(reply, successAnswer({ batches }));
  }

  @Get('statements/:portalId')
  @Scoped()
  @ApiOperation({
    summary: 'The statement of an agency for a month: opening, movements, fees, payments, closing, deposits',
    description: '`final`: the month is closed, and nothing of it changes any more. `position` and `digest` are those of the closing.',
    operationId: 'auditStatement',
  })
  @ApiParam({ name: 'portalId', schema: { type: 'string', format: 'uuid' } })
  @ApiQuery({ name: 'period', required: true, description: 'A month, such as 2026-11', schema: { type: 'string' } })
  @Text('zone', 'Time zone of the month, such as America/Chicago. Default: UTC')
  @Text('format', 'json (the default) or csv')
  @Answers(
    {
      portalId: TEXT,
      name: TEXT,
      period: TEXT,
      zone: TEXT,
      from: TEXT,
      to: TEXT,
      openingCents: CENTS,
      movements: OBJECT,
      fees: OBJECT,
      fundedCents: CENTS,
      remittedCents: CENTS,
      closingCents: CENTS,
      deposits: LIST,
      final: { type: 'boolean' },
      position: { type: ['string', 'null'] },
      digest: { type: ['string', 'null'] },
    },
    { 'text/csv': {} },
  )
  async statement(
    @AuditorOf() { scope }: AuditCaller,
    @Param('portalId') portalId: string,
    @Query() query: Values,
    @Res() reply: FastifyReply,
  ): Promise<void> {
    const { period, zone, format = 'json' } = known(query, 'period', 'zone', 'format');
    if (format !== 'json' && format !== 'csv') throw fault('format', 'must be json or csv');
    if (period === undefined) throw fault('period', 'is required');
    if (!isUuid(portalId)) throw portalNotFound();
    const position = await this.standing(reply, journalModel, lineRegisterModel);
    const { store, pool: db } = this.services;
    const statement = await statementOf({ store, db, position }, scope, { portalId: portalId.toLowerCase(), period, zone });
    if (format === 'json') return sendAnswer(reply, successAnswer(statement));
    void reply.header('content-type', 'text/csv; charset=utf-8; header=present').send(statementCsv(statement));
  }

  @Get('events')
  @Scoped()
  @ApiOperation({
    summary: 'Events of the log after a place, in its order',
    description:
      'Each event comes at least once. `next` is the place for the next call; store it together with what was done. `end`: nothing followed. ' +
      'Personal data, texts of people and secrets are left out of `data`.',
    operationId: 'auditEvents',
  })
  @Text('after', '`next` of the answer before. Default: the start of the log')
  @Text('limit', 'At most 1000')
  @Text('types', 'Only events of these types, separated by commas')
  @Text('wait', 'Seconds for which an answer without events is held, at most 30')
  @Answers({ events: LIST, next: { type: ['string', 'null'] }, end: { type: 'boolean' } })
  @ApiResponse({ status: 429, type: ErrorEnvelope })
  async events(@AuditorOf() { keyId, scope }: AuditCaller, @Query() query: Values, @Res() reply: FastifyReply): Promise<void> {
    const { after = null, limit, types, wait } = known(query, 'after', 'limit', 'types', 'wait');
    const asked = { after, limit: count(limit), types: feedTypes(types) };
    const waitMs = waitOf(wait) * 1_000;
    const { store, pool: db } = this.services;
    this.refuseIncident();
    const read = () => eventPage({ store, db }, scope, asked);
    const seat = waitMs === 0 ? null : await this.seat(keyId);
    if (seat === null) return this.sendFeed(reply, await this.running.query(read));
    const gone = new AbortController();
    reply.raw.once('close', () => gone.abort('the reader is gone'));
    try {
      // A reader with a seat takes its turn, and is not refused: there are few seats, and an event wakes all of them.
      const page = seat.isAt(after) ? null : await this.pace.step(read);
      const isAnswer = page !== null && (page.events.length > 0 || !page.end);
      this.sendFeed(reply, isAnswer ? page : await seat.wait(scope, { ...asked, after: page ? page.next : after }, waitMs, gone.signal));
    } finally {
      seat.leave();
    }
  }

  @Get('changed-payments')
  @Scoped()
  @ApiOperation({
    summary: 'Payments that changed after a place of the log, each once, as they are now',
    description: '`next` never passes the place up to which the list of payments is complete. Personal data is null.',
    operationId: 'auditChangedPayments',
  })
  @Text('after', '`next` of the answer before. Default: the start of the log')
  @Text('limit')
  @Answers({ payments: LIST, next: { type: ['string', 'null'] }, end: { type: 'boolean' } })
  async changedPayments(@AuditorOf() { scope }: AuditCaller, @Query() query: Values, @Res() reply: FastifyReply): Promise<void> {
    const { after = null, limit } = known(query, 'after', 'limit');
    const size = count(limit);
    this.refuseIncident();
    const { store, pool: db } = this.services;
    const until = (await projectionPlace(store, postgresCheckpoint(db, checkpointOf(paymentListModel)))).position;
    this.sendFeed(reply, await changedPayments({ store, db }, scope, { after, limit: size, until }));
  }

  /** In an incident of the event store, a place of the log may be lost or belong to another log (C76). A reader must not take that for an answer. */
  private refuseIncident(): void {
    if (this.services.ownLog.incident !== null) throw storeIncident();
  }

  private async seat(keyId: string): ReturnType<FeedWaits['take']> {
    try {
      return await this.waits.take(keyId);
    } catch (error) {
      if (error instanceof ServiceError) this.onLimit('waits');
      throw error;
    }
  }

  /** Sends a page. Its headers say up to where it is complete, and how many events of the log follow. */
  private sendFeed(
    reply: FastifyReply,
    { head, ...page }: { readonly head: string | null; readonly next: string | null; readonly end: boolean },
  ): void {
    const lag = page.end || head === null ? 0 : eventsBetween(page.next as Position | null, head as Position);
    void reply.header('ledger-position', page.next ?? '').header('ledger-lag', lag === null ? 'unknown' : String(lag));
    sendAnswer(reply, successAnswer(page));
  }

  @Get('exports/:report')
  @Scoped()
  @ApiOperation({ summary: `A report as a stream: ${Object.keys(REPORTS).join(', ')}`, operationId: 'auditExport' })
  @ApiParam({ name: 'report', schema: { type: 'string', enum: Object.keys(REPORTS) } })
  @Text('format', 'csv (the default) or ndjson')
  @Text('from')
  @Text('to')
  @AsOf()
  @Text('after', 'Go on after a place, as the trailer Export-After named it. Of line-items: a place of the log, for what came since')
  @Personal()
  @ApiResponse({
    status: 200,
    description:
      'Rows; the trailers Export-Rows and Export-After say that it is whole, Export-Manifest is JSON: query, rows, totals, place, head, SHA-256',
    headers: LEDGER_HEADERS,
    content: { 'text/csv': {}, 'application/x-ndjson': {} },
  })
  @ApiResponse({ status: 400, type: ErrorEnvelope })
  @ApiResponse({ status: 401, type: ErrorEnvelope })
  @ApiResponse({ status: 403, type: ErrorEnvelope })
  @ApiResponse({ status: 503, type: ErrorEnvelope })
  async export(@AuditorOf() caller: AuditCaller, @Param('report') report: string, @Query() query: Values, @Res() reply: FastifyReply): Promise<void> {
    const { format = 'csv', from, to, asOf, after, personal } = known(query, 'format', 'from', 'to', 'asOf', 'after', 'personal');
    if (!isReport(report)) throw fault('report', `must be one of ${Object.keys(REPORTS).join(', ')}`);
    if (format !== 'csv' && format !== 'ndjson') throw fault('format', 'must be csv or ndjson');
    const open = opens(caller, personal);
    const { auditorsOnly, byPosition = false, projection, comparedWith } = reportOf(report);
    refuseReport(report, caller.scope);
    if (auditorsOnly && caller.role !== 'auditor') throw new AuthenticationError(403, 'This report needs a key of an auditor.');
    const places = byPosition ? SAME : this.places(caller.keyId, `exports/${report}`, 'after');
    const place = after === undefined ? null : places.open(after);
    const asked = { from: time('from', from), to: time('to', to), asOf: time('asOf', asOf), after: place };
    const position = await this.standing(reply, projection, ...(comparedWith ? [comparedWith] : []), ...modelsOf(caller.scope));
    const { store, pool, clock, log } = this.services;
    const download = new Download(reply.raw, clock);
    const ports = { store, db: pool, ...(open && { personal: this.services.personal }) };
    const { pieces, manifest, rows } = exportReport(ports, caller.scope, report, format, asked, position);
    const opening = open ? await this.services.openings.begin({ actor: `audit key ${caller.keyId}`, report: `exports/${report}` }) : null;
    // Read the first piece before the status is sent. If the query fails here, the status can still report the fault.
    const next = () => this.pace.step(() => pieces.next());
    const first = await next();
    const headers = reply.getHeaders() as Record<string, string>;
    reply.hijack();
    const { raw } = reply;
    raw.writeHead(200, {
      ...headers,
      'content-type': format === 'csv' ? 'text/csv; charset=utf-8; header=present' : 'application/x-ndjson',
      trailer: 'Export-Rows, Export-After, Export-Manifest',
    });
    try {
      for (let piece = first; !piece.done; piece = await next()) {
        if (raw.destroyed) return;
        await download.write(piece.value);
      }
      const made = await manifest();
      const end = made.after && places.seal(made.after);
      raw.addTrailers({
        'Export-Rows': String(made.rows),
        'Export-After': end ?? '',
        'Export-Manifest': JSON.stringify({ ...inTrailer(made), after: end, query: { ...made.query, after: after ?? null } }),
      });
      await download.end();
    } catch (error) {
      if (error instanceof CutOff) {
        this.onLimit(error.limit);
        log.warn({ report, keyId: caller.keyId, reason: error.message }, 'an export was cut off');
      } else log.error({ err: error, report }, 'an export broke off');
      // End the connection without the last chunk and the trailer. The client then knows that the file is incomplete.
      raw.destroy();
    } finally {
      // An export that broke off has shown rows, too.
      await opening?.shown(rows()).catch((error: unknown) => log.error({ err: error, report }, 'an opening of personal data was not counted'));
      // Also waits for the page that is being read, so the export counts until its last statement has ended.
      await pieces.return();
    }
  }

  /** Reads with or without personal data. If it is opened, notes who read what before it is sent. */
  private async reading<T extends object>({ keyId }: AuditCaller, open: boolean, report: string, read: (reader: Reader) => Promise<T>): Promise<T> {
    const { personal, openings } = this.services;
    const opening = open ? await openings.begin({ actor: `audit key ${keyId}`, report }) : null;
    const found = await read(readerOf(personal, open));
    await opening?.shown(Array.isArray(found) ? found.length : 'payments' in found ? (found.payments as readonly unknown[]).length : 1);
    return found;
  }

  /** Sets the headers of an answer that is read from event streams and has no lag. */
  private async complete(reply: FastifyReply): Promise<void> {
    void reply.header('ledger-position', (await this.services.store.head()) ?? '').header('ledger-lag', '0');
  }

  /** The cursors of a list for one key, from the parameter `name`. */
  private places(keyId: string, list: string, name: 'cursor' | 'after' = 'cursor'): Places {
    const { keys } = this.services;
    return {
      open: (cursor) => {
        const place = openPlace(keys, keyId, list, cursor);
        if (place === null) throw fault(name, name === 'cursor' ? 'is not one of this list' : 'is not a place of this report');
        return place;
      },
      seal: (place) => sealPlace(keys, keyId, list, place),
    };
  }

  /**
   * Sets the headers to the position and lag of a read model; of several, to those of the latest one. Call this right before they are queried.
   * Returns the position.
   */
  private async standing(reply: FastifyReply, ...models: readonly ReadModel[]): Promise<string | null> {
    const { store, pool } = this.services;
    const standing: Awaited<ReturnType<typeof projectionPlace>>[] = [];
    // One after the other: a request uses one connection.
    for (const model of models) standing.push(await projectionPlace(store, postgresCheckpoint(pool, checkpointOf(model))));
    const { position, head, lagEvents } = standing.reduce((late, one) => ((one.position ?? '') < (late.position ?? '') ? one : late));
    const lag = head === null || (position !== null && position >= head) ? '0' : lagEvents === null ? 'unknown' : String(lagEvents);
    void reply.header('ledger-position', position ?? '').header('ledger-lag', lag);
    return position;
  }
}

/** The read models that say whether a payment is in scope. An answer is as late as the latest one that it is read from. */
const modelsOf = (scope: Scope): readonly ReadModel[] => (scope === null ? [] : [paymentListModel]);

/** A client accepts some 16 KiB of headers and trailers. A tie of more accounts than this is named by their number only. */
const MAX_TIE_IN_TRAILER = 40;
const inTrailer = ({ tie, ...made }: ExportManifest): object =>
  tie === undefined ? made : { ...made, ...(tie.length <= MAX_TIE_IN_TRAILER ? { tie } : { tieAccounts: tie.length }) };

interface Places {
  /** Throws 400 for a cursor of another key or list. */
  readonly open: (cursor: string) => string;
  readonly seal: (place: string) => string;
}

const SAME: Places = { open: (place) => place, seal: (place) => place };

/** We sealed the place, so it has this form. */
const timedPlace = (place: string): { readonly createdAt: string; readonly id: string } => {
  const [createdAt, id] = place.split(' ') as [string, string];
  return { createdAt, id };
};
