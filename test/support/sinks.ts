/** The places where a service leaves data, and the search for texts in them. */
import type { Pool } from '#platform';

/** The forms in which a program may write a text: as it is, two-byte, hex, base64 at each alignment, percent-encoded, escaped, backwards. */
export const formsOf = (text: string): readonly Buffer[] => {
  const bytes = Buffer.from(text);
  const base64 = [0, 1, 2].map((shift) => {
    const coded = Buffer.concat([Buffer.alloc(shift), bytes])
      .toString('base64')
      .replaceAll('=', '');
    // The first and the last characters depend on the neighbours.
    return coded.slice(shift === 0 ? 0 : shift + 1, coded.length - 1);
  });
  return [
    bytes,
    Buffer.from(text, 'utf16le'),
    Buffer.from(bytes.toString('hex')),
    Buffer.from(bytes.toString('hex').toUpperCase()),
    ...base64.map((coded) => Buffer.from(coded)),
    Buffer.from(encodeURIComponent(text)),
    Buffer.from(encodeURIComponent(text).replaceAll('%20', '+')),
    Buffer.from([...text].reverse().join('')),
    Buffer.from(text.toLowerCase()),
    Buffer.from(text.toUpperCase()),
  ];
};

export interface Sink {
  readonly name: string;
  readonly bytes: Buffer;
}

/** The names of the texts that stand in the sinks, each with the sink. */
export const search = (texts: Readonly<Record<string, string>>, sinks: readonly Sink[]): string[] =>
  Object.entries(texts).flatMap(([name, text]) => {
    const forms = formsOf(text);
    return sinks.filter(({ bytes }) => forms.some((form) => bytes.includes(form))).map((sink) => `${name} in ${sink.name}`);
  });

/** The rows of all tables, as text. */
export const tablesOf = async (pool: Pool): Promise<Sink[]> => {
  const { rows } = await pool.query<{ name: string }>(
    `select quote_ident(n.nspname) || '.' || quote_ident(c.relname) as name from pg_class c join pg_namespace n on n.oid = c.relnamespace
     where c.relkind in ('r', 'p', 'm') and n.nspname not in ('pg_catalog', 'information_schema', 'pg_toast')`,
  );
  const sinks: Sink[] = [];
  for (const { name } of rows) {
    const { rows: found } = await pool.query<{ row: string }>(`select t::text as row from ${name} t`);
    sinks.push({ name: `table ${name}`, bytes: Buffer.from(found.map(({ row }) => row).join('\n')) });
  }
  return sinks;
};
