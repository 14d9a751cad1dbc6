/** E-mail addresses: which are accepted, and the form in which two of them are compared. */
import { domainToASCII } from 'node:url';

/** RFC 5321 allows 254 characters. */
export const MAX_EMAIL_LENGTH = 254;
/** The patterns need linear time, and the length is checked first. So no text can cause backtracking. */
const LOCAL = /^[^\s@<>()",;:\\[\]]{1,64}$/;
const DOMAIN = /^(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z][A-Za-z0-9-]{0,61}[A-Za-z0-9]$/;
/** `domainToASCII` reads a host as URLs do, so it would also decode percent signs. It gets letters, digits and characters beyond ASCII only. */
const INTERNATIONAL = /^(?:[A-Za-z0-9.-]|[^\0-\x7f])+$/;
/** Control characters, and characters that are not displayed. The bidi overrides are among them. */
const UNSEEN = /[\p{Cc}\p{Default_Ignorable_Code_Point}]/gu;

/** A domain in ASCII and lower case (UTS 46). Empty: the text is no domain. */
const asciiDomain = (domain: string): string => {
  const ascii = DOMAIN.test(domain) ? domain.toLowerCase() : INTERNATIONAL.test(domain) ? domainToASCII(domain) : '';
  return DOMAIN.test(ascii) ? ascii : '';
};

const split = (address: string) => {
  const at = address.lastIndexOf('@');
  return { local: address.slice(0, Math.max(at, 0)), domain: address.slice(at + 1) };
};

/** True for an address that older releases accepted, too. {@link unseenInEmail} is the younger rule. */
export const isEmail = (value: unknown): value is string => {
  if (typeof value !== 'string' || value.length > MAX_EMAIL_LENGTH) return false;
  const { local, domain } = split(value);
  const ascii = asciiDomain(domain);
  return LOCAL.test(local) && ascii !== '' && local.length + 1 + ascii.length <= MAX_EMAIL_LENGTH;
};

/** The fault of an address that holds an invisible character. A search by the address that people see must find it. null: there is no fault. */
export const unseenInEmail = (address: string): string | null => (address.search(UNSEEN) < 0 ? null : 'must not hold invisible characters');

/** The form in which addresses are compared: without invisible characters, in NFC and lower case, with the domain in ASCII. */
export const comparableEmail = (address: string): string => {
  const { local, domain } = split(address.replace(UNSEEN, '').trim().normalize('NFC'));
  return `${local}@${asciiDomain(domain) || domain}`.toLowerCase();
};
