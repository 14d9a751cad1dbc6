/**
 * The adapters of the merchant accounts, made from the rows of the directory. A change of a row replaces the adapter within seconds, in every process
 * and without a restart.
 */
import { credentialsRefOf, type Directory, type MerchantAccount, openCredentials } from '#accounts';
import { canonicalJson } from '#kernel';
import type { GatewayAccount, PaymentGateway } from '#payments';
import type { KeyRing, Logger } from '#platform';
import { type AdapterContext, createVendorGateway } from './vendors.js';

/** How often the rows are read. */
export const RELOAD_EVERY_MS = 2_000;
/** A replaced adapter is closed after this time. A call that moves money takes seconds, an import of a large batch takes minutes. */
const RETIRED_MS = 15 * 60_000;

export interface MerchantGatewayOptions extends AdapterContext {
  readonly directory: Pick<Directory, 'merchantAccount' | 'merchantAccounts'>;
  readonly keys: KeyRing;
  readonly environment: 'sandbox' | 'production';
  readonly logger: Logger;
  /** Wraps each adapter, for metrics. */
  readonly observed: (name: string, gateway: PaymentGateway) => PaymentGateway;
  /** Called when an account is taken into use (0), and each time its credentials are refused (1). */
  readonly countRefused?: (account: Pick<MerchantAccount, 'gateway' | 'merchantAccount'>, more: 0 | 1) => void;
}

interface Known {
  readonly account: MerchantAccount;
  /** Of everything that the adapter was made from. */
  readonly fingerprint: string;
  /** null: the credentials cannot be opened. */
  readonly gateway: PaymentGateway | null;
}

export class MerchantGateways {
  private readonly known = new Map<string, Known>();
  private readonly retired = new Set<PaymentGateway>();
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
    if (!before) this.options.countRefused?.(account, 0);
    const fingerprint = canonicalJson({ gateway, environment, settings, credentials, repeats });
    if (before?.fingerprint === fingerprint) {
      this.known.set(merchantAccount, { ...before, account });
      return;
    }
    this.known.set(merchantAccount, { account, fingerprint, gateway: this.adapterOf(account) });
    if (before?.gateway) this.retire(before.gateway);
  }

  private adapterOf(account: MerchantAccount): PaymentGateway | null {
    const { keys, logger, observed, clock, endpoints } = this.options;
    const { merchantAccount } = account;
    const log = (message: string, fields: object) => logger.error({ merchantAccount, ...fields }, message);
    const context = { clock, log, onRefusedCredentials: () => this.options.countRefused?.(account, 1), ...(endpoints && { endpoints }) };
    try {
      return observed(account.gateway, createVendorGateway(account, openCredentials(keys, account), context));
    } catch (error) {
      logger.error({ err: error, merchantAccount }, 'the credentials of a merchant account cannot be opened; it answers 503');
      return null;
    }
  }

  /** Calls that began at the adapter go on. */
  private retire(gateway: PaymentGateway): void {
    this.retired.add(gateway);
    void this.options.clock.sleep(RETIRED_MS, this.stop.signal).then(() => {
      gateway.close();
      this.retired.delete(gateway);
    });
  }

  close(): void {
    this.stop.abort();
    for (const { gateway } of this.known.values()) gateway?.close();
    for (const gateway of this.retired) gateway.close();
  }
}
