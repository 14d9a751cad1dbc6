/** Lines of settlement, each with its batch: as tests write and read them. The port lists batches. */
import type { PaymentGateway, SettledBatch, SettlementRecord } from '#payments';

export type ListedLine = SettlementRecord & Pick<SettledBatch, 'batchId' | 'closedAt' | 'fundedOn'>;

/** The batches of these lines, in their order. The cursor of a batch is its id. */
export const batchesOf = async function* (lines: Iterable<ListedLine>): AsyncGenerator<SettledBatch, void, void> {
  const batches: { head: Pick<SettledBatch, 'batchId' | 'closedAt' | 'fundedOn'>; lines: SettlementRecord[] }[] = [];
  for (const { batchId, closedAt, fundedOn, ...line } of lines) {
    if (batches.at(-1)?.head.batchId !== batchId)
      batches.push({ head: { batchId, closedAt, ...(fundedOn !== undefined && { fundedOn }) }, lines: [] });
    batches.at(-1)!.lines.push(line);
  }
  for (const { head, lines: own } of batches) yield { ...head, cursor: head.batchId, lines: inTurn(own) };
};

const inTurn = async function* <T>(items: readonly T[]): AsyncGenerator<T, void, void> {
  yield* items;
};

/** All lines that a gateway lists after `cursor`. */
export const listedLines = async (
  gateway: Pick<PaymentGateway, 'settlements'>,
  cursor: string | null,
  signal: AbortSignal,
): Promise<ListedLine[]> => {
  const all: ListedLine[] = [];
  for await (const { batchId, closedAt, fundedOn, lines } of gateway.settlements(cursor, signal))
    for await (const line of lines) all.push({ ...line, batchId, closedAt, ...(fundedOn !== undefined && { fundedOn }) });
  return all;
};
