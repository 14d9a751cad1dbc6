/** Money and times as payers read them. */
import { type Cents, decimal } from '#kernel';
import type { Locale } from './text.js';

/** Both languages use the US format, since the money is US dollars. `es` alone would give `128,13 US$`. */
const TAGS: Readonly<Record<Locale, string>> = { en: 'en-US', es: 'es-US' };

const of = <T>(make: (tag: string) => T): Readonly<Record<Locale, T>> => ({ en: make(TAGS.en), es: make(TAGS.es) });

const MONEY = of((tag) => new Intl.NumberFormat(tag, { style: 'currency', currency: 'USD' }));
/** Times are in UTC, since the server does not know the payer's time zone. The page's script converts them to that zone. */
const DAY_AND_TIME = of(
  (tag) =>
    new Intl.DateTimeFormat(tag, {
      year: 'numeric',
      month: 'long',
      day: 'numeric',
      hour: 'numeric',
      minute: '2-digit',
      timeZone: 'UTC',
      timeZoneName: 'short',
    }),
);
const TIME = of((tag) => new Intl.DateTimeFormat(tag, { hour: 'numeric', minute: '2-digit', timeZone: 'UTC', timeZoneName: 'short' }));

/** Formats cents without floating-point arithmetic. */
export const money = (locale: Locale, cents: Cents): string => MONEY[locale].format(decimal(cents) as `${number}`);

export const dayAndTime = (locale: Locale, at: string): string => DAY_AND_TIME[locale].format(new Date(at));
export const timeOfDay = (locale: Locale, at: string): string => TIME[locale].format(new Date(at));

const BRANDS: Readonly<Record<string, string>> = {
  visa: 'Visa',
  mastercard: 'Mastercard',
  amex: 'American Express',
  discover: 'Discover',
  diners: 'Diners Club',
  jcb: 'JCB',
  unionpay: 'UnionPay',
};
export const brandName = (brand: string, otherwise: string): string => BRANDS[brand] ?? otherwise;
