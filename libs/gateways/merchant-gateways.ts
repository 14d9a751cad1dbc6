/**
 * The adapters of the merchant accounts, made from the rows of the directory. A change of a row replaces the adapter within seconds, in every process
 * and without a restart.
 */
import { type ChargeStops, credentialsRefOf, type Directory, type MerchantAccount, openCredentials, type Stopped } from '#accounts';
import { canonicalJson } from '#kernel';
import type { ChargeTxn, GatewayAccount, Outcome, PaymentGateway, Ref, TransactionClaims } from '#payments';
import type { KeyRing, Logger } from '#platform';
import { type AdapterContext, createVendorGateway } from './vendors.js';

/** How often the rows are read, of the accounts and of the stops. */
export const RELOAD_EVERY_MS = 2_000;
/** A replaced adapter is closed after this time. A call that moves money takes seconds, an import of a large batch takes minutes. */
const RETIRED_MS = 15 * 60_000;
/** How often the processor of a stopped account is asked whether it answers again. */
const ASK_AGAIN_MS = 30_000;
const DESCRIBE_MS = 20_000;

export interface MerchantGatewayOptions extends AdapterContext {
  readonly directory: Pick<Directory, 'merchantAccount' | 'merchantAccounts'>;
  readonly keys: KeyRing;
  readonly environment: 'sandbox' | 'production';
  readonly logger: Logger;
  readonly stops: ChargeStops;
  /** Wraps each adapter, for metrics. */
  readonly observed: (name: string, gateway: PaymentGateway) => PaymentGateway;
  /** Called when an account is taken into use (0), and each time its credentials are refused (1). */
  readonly countRefused?: (account: Pick<MerchantAccount, 'gateway' | 'merchantAccount'>, more: 0 | 1) => void;
  /** Records that the account takes no charges until a person enables it. */
  readonly disableCharges: (merchantAccount: string, reason: string) => Promise<void>;
  readonly claims: TransactionClaims;
  /** The same for each answer that needs a person at once: in test mode, or with the transaction of another charge. */
  readonly countAlarm?: (account: Pick<MerchantAccount, 'gateway' | 'merchantAccount'>, more: 0 | 1) => void;
  /** The same for each charge that is held for review. */
  readonly countHeld?: (account: Pick<MerchantAccount, 'gateway' | 'merchantAccount'>, more: 0 | 1) => void;
}

interface Known {
  readonly account: MerchantAccount;
  /** Of everything that the adapter was made from. */
  readonly fingerprint: string;
  /** null: the credentials cannot be opened. */
  readonly adapter: PaymentGateway | null;
  /** The adapter with stops and counts, as the service uses it. */
  readonly gateway: PaymentGateway | null;
}

const TEST_MODE_REASON =
  'The processor answered in test mode, so it moved no money. Turn test mode off there, then enable this account: payfold merchant-accounts enable.';

interface Stop {
  /** When the processor is asked whether it answers again. Monotonic. */
  readonly askAt: number;
  /** True: the other processes can read it. */
  readonly isWritten: boolean;
}

export class MerchantGateways {
  private readonly known = new Map<string, Known>();
  private readonly retired = new Set<PaymentGateway>();
  /** By id of the account. No new charge begins through them. */
  private readonly stopped = new Map<string, Stop>();
  /** By id of the account: in test mode, and not recorded as disabled yet. */
  private readonly inTestMode = new Set<string>();
  /** Writes of stops and questions to processors that are under way. */
  private readonly pending = new Set<Promise<unknown>>();
  private readonly stop = new AbortController();
  /** Reads run one after another, so that an older row never replaces a newer one. */
  private reading: Promise<unknown> = Promise.resolve();
  private failed = false;

  constructor(private readonly options: MerchantGatewayOptions) {}

  /** null: the account is unknown to this process, disabled for everything, or of another environment. */
  find({ gateway, merchantAccount, credentialsRef, environment }: GatewayAccount): PaymentGateway | null {
    const known = this.known.get(merchantAccount);
    if (!known || known.account.status === 'disabled' || environment !== this.options.environment) return null;
    const isSame =
      known.account.gateway === gateway && known.account.environment === environment && credentialsRefOf(merchantAccount) === credentialsRef;
    return isSame ? known.gateway : null;
  }

  /** Reads one account. */
  load(merchantAccount: string): Promise<void> {
    return this.read(async () => {
      const account = await this.options.directory.merchantAccount(merchantAccount);
      if (account) this.take(account);
    });
  }

  /** Reads all accounts. Returns their number. */
  reload(): Promise<number> {
    return this.read(async () => {
      const accounts = await this.options.directory.merchantAccounts();
      for (const account of accounts) this.take(account);
      if (this.known.size > 0) await this.followStops();
      return accounts.length;
    });
  }

  private read<T>(work: () => Promise<T>): Promise<T> {
    const reading = this.reading.then(work);
    this.reading = reading.catch(() => undefined);
    return reading;
  }

  /** Reads all accounts again and again, until {@link close}. */
  async follow(): Promise<void> {
    const { clock, logger } = this.options;
    while (!this.stop.signal.aborted) {
      await clock.sleep(RELOAD_EVERY_MS, this.stop.signal);
      if (this.stop.signal.aborted) return;
      try {
        await this.reload();
        this.askAgain();
        for (const merchantAccount of this.inTestMode) this.disableForTestMode(merchantAccount);
        this.failed = false;
      } catch (error) {
        if (!this.failed) logger.warn({ err: error }, 'the merchant accounts cannot be read; the known ones stay in use');
        this.failed = true;
      }
    }
  }

  private take(account: MerchantAccount): void {
    const { merchantAccount, gateway, environment, settings, credentials, repeats } = account;
    if (environment !== this.options.environment) return;
    const before = this.known.get(merchantAccount);
    if (!before) {
      this.options.countRefused?.(account, 0);
      this.options.countHeld?.(account, 0);
      this.options.countAlarm?.(account, 0);
    }
    const fingerprint = canonicalJson({ gateway, environment, settings, credentials, repeats });
    if (before?.fingerprint === fingerprint) {
      this.known.set(merchantAccount, { ...before, account });
      return;
    }
    const adapter = this.adapterOf(account);
    this.known.set(merchantAccount, { account, fingerprint, adapter, gateway: adapter && this.usedFor(account, adapter) });
    if (before?.gateway) this.retire(before.gateway);
    // New credentials or settings may have mended what stopped the account.
    const stop = this.stopped.get(merchantAccount);
    if (stop) this.stopped.set(merchantAccount, { ...stop, askAt: 0 });
  }

  /** The adapter, with the stops of all processes. Counts the charges that are held, and refuses the transaction of another charge. */
  private usedFor(account: MerchantAccount, adapter: PaymentGateway): PaymentGateway {
    return {
      ...adapter,
      mayCharge: () => !this.stopped.has(account.merchantAccount) && !this.inTestMode.has(account.merchantAccount),
      charge: async (call, signal) => {
        const outcome = await adapter.charge(call, signal);
        if (outcome.kind === 'held' && outcome.why !== 'partial') this.options.countHeld?.(account, 1);
        return (await this.isOfAnother(account, outcome, call.ref))
          ? { kind: 'unknown', cause: 'unreadable', raw: 'a transaction of another charge' }
          : outcome;
      },
      finalize: async (call, signal) => {
        const found = await adapter.finalize(call, signal);
        // Recovery undoes what was executed. So it must not learn of a transaction that belongs to another charge.
        const isCharge = call.op === 'charge' && found.kind === 'executed';
        return isCharge && (await this.isOfAnother(account, found.result as Outcome<ChargeTxn>, call.ref))
          ? { kind: 'cannot_tell', why: 'unreachable' }
          : found;
      },
    };
  }

  /** True if the transaction of an outcome belongs to another reference, or nobody can tell now. */
  private async isOfAnother(account: MerchantAccount, outcome: Outcome<ChargeTxn>, ref: Ref): Promise<boolean> {
    if (outcome.kind !== 'approved' && outcome.kind !== 'held') return false;
    const { transactionId } = outcome.kind === 'held' ? outcome : outcome.txn;
    const { claims, logger, countAlarm } = this.options;
    const { merchantAccount } = account;
    try {
      if (await claims.claim(account, transactionId, ref)) return false;
    } catch (error) {
      logger.warn({ err: error, merchantAccount, ref }, 'the owner of a transaction cannot be told now; the charge is unknown');
      return true;
    }
    logger.error({ merchantAccount, transactionId, ref }, 'the processor answered two charges with the same transaction; the second one is unknown');
    countAlarm?.(account, 1);
    return true;
  }

  /** Nothing was charged. No process may charge through the account until a person has enabled it. */
  private stopForTestMode(account: MerchantAccount): void {
    const { merchantAccount } = account;
    this.options.countAlarm?.(account, 1);
    if (this.inTestMode.has(merchantAccount)) return;
    this.inTestMode.add(merchantAccount);
    this.disableForTestMode(merchantAccount);
  }

  /** Keeps the stop of this process until the directory shows that the account is disabled. */
  private disableForTestMode(merchantAccount: string): void {
    if (this.known.get(merchantAccount)?.account.status !== 'active') return void this.inTestMode.delete(merchantAccount);
    const disabled = this.options.disableCharges(merchantAccount, TEST_MODE_REASON);
    this.inBackground(
      disabled.catch((error: unknown) =>
        this.options.logger.warn({ err: error, merchantAccount }, 'an account in test mode cannot be disabled yet; it is tried again'),
      ),
    );
  }

  private adapterOf(account: MerchantAccount): PaymentGateway | null {
    const { keys, logger, observed, clock, endpoints } = this.options;
    const { merchantAccount } = account;
    const log = (message: string, fields: object) => logger.error({ merchantAccount, ...fields }, message);
    const context = {
      clock,
      log,
      onRefusedCredentials: ({ isWhole }: { readonly isWhole: boolean }) => {
        this.options.countRefused?.(account, 1);
        if (isWhole) this.stopCharges(account);
      },
      onTestMode: () => this.stopForTestMode(account),
      onRefusedLists: () => this.stopCharges(account),
      ...(endpoints && { endpoints }),
    };
    try {
      return observed(account.gateway, createVendorGateway(account, openCredentials(keys, account), context));
    } catch (error) {
      logger.error({ err: error, merchantAccount }, 'the credentials of a merchant account cannot be opened; it answers 503');
      return null;
    }
  }

  /** The processor has refused its lists, or the credentials, to this process. The other processes must know it. */
  private stopCharges(account: MerchantAccount): void {
    const { merchantAccount } = account;
    const { askAt } = this.stopped.get(merchantAccount) ?? { askAt: this.options.clock.monotonic() + ASK_AGAIN_MS };
    this.stopped.set(merchantAccount, { askAt, isWritten: false });
    this.writeStop(account);
  }

  private writeStop(account: Stopped): void {
    const { merchantAccount } = account;
    const written = this.options.stops.stop(account).then(
      () => {
        const stop = this.stopped.get(merchantAccount);
        if (stop) this.stopped.set(merchantAccount, { ...stop, isWritten: true });
      },
      (error: unknown) => this.options.logger.warn({ err: error, merchantAccount }, 'a stop of new charges cannot be shared yet; it is tried again'),
    );
    this.inBackground(written);
  }

  /** Takes over the stops of all processes, and shares those that are not shared yet. */
  private async followStops(): Promise<void> {
    const { stops, clock, logger } = this.options;
    // The rows that are read may lack a stop that is written meanwhile.
    const shared = [...this.stopped].filter(([, { isWritten }]) => isWritten).map(([merchantAccount]) => merchantAccount);
    const rows = (await stops.all()).filter(({ gateway, merchantAccount }) => this.known.get(merchantAccount)?.account.gateway === gateway);
    for (const { merchantAccount } of rows)
      if (!this.stopped.has(merchantAccount)) {
        this.stopped.set(merchantAccount, { askAt: clock.monotonic() + ASK_AGAIN_MS, isWritten: true });
        logger.error({ merchantAccount }, 'No new charges: the processor refuses another process');
      }
    for (const merchantAccount of shared) {
      if (rows.some((row) => row.merchantAccount === merchantAccount)) continue;
      // Another process got an answer. If this process's own adapter was refused, it asks for itself first.
      if (this.known.get(merchantAccount)?.adapter?.mayCharge?.() === false) this.stopped.set(merchantAccount, { askAt: 0, isWritten: true });
      else this.stopped.delete(merchantAccount);
    }
    for (const [merchantAccount, { isWritten }] of this.stopped)
      if (!isWritten) this.writeStop({ merchantAccount, gateway: this.known.get(merchantAccount)!.account.gateway });
  }

  /** Asks the processors of stopped accounts whether they show their lists again. */
  private askAgain(): void {
    const { clock, logger, stops } = this.options;
    const now = clock.monotonic();
    for (const [merchantAccount, stop] of this.stopped) {
      const { adapter, account } = this.known.get(merchantAccount)!;
      if (stop.askAt > now || adapter === null || account.status === 'disabled') continue;
      this.stopped.set(merchantAccount, { ...stop, askAt: now + ASK_AGAIN_MS });
      const asked = adapter.describe(AbortSignal.any([this.stop.signal, AbortSignal.timeout(DESCRIBE_MS)])).then(async () => {
        if (adapter.mayCharge?.() === false) return;
        await stops.end(account);
        this.stopped.delete(merchantAccount);
        logger.info({ merchantAccount }, 'the processor answers again, so charges begin again');
      });
      // A processor that does not answer is asked again.
      this.inBackground(asked.catch(() => undefined));
    }
  }

  private inBackground(work: Promise<unknown>): void {
    this.pending.add(work);
    void work.finally(() => this.pending.delete(work));
  }

  /** Calls that began at the adapter go on. */
  private retire(gateway: PaymentGateway): void {
    this.retired.add(gateway);
    void this.options.clock.sleep(RETIRED_MS, this.stop.signal).then(() => {
      gateway.close();
      this.retired.delete(gateway);
    });
  }

  /** Resolves when no write of a stop and no question to a processor is under way. */
  async close(): Promise<void> {
    this.stop.abort();
    for (const { gateway } of this.known.values()) gateway?.close();
    for (const gateway of this.retired) gateway.close();
    await Promise.all(this.pending);
  }
}
