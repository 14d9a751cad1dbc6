/** Answers as a partner gets them, and helpers that read them. */
import { ServiceError } from '#kernel';
import type { Answered } from '#payments';
import { type Answer, errorAnswer } from '#platform';
import { answerOf } from '../../apps/answers.js';

/** The answer to a partner: the answer of the command, or the refusal that it threw. */
export const sent = (command: Promise<Answered<unknown>>): Promise<Answer> =>
  command.then(answerOf, (error: unknown) => {
    if (error instanceof ServiceError) return errorAnswer(error);
    throw error;
  });

/** The body of an answer, with `code` moved out of the details. */
export const read = <T = Record<string, unknown>>(
  answer: Answer,
): { status: number; code: string | undefined; message: string | undefined; data: T; details: Record<string, unknown> } => {
  const {
    data,
    message,
    details: { code, ...details } = {},
  } = JSON.parse(answer.body) as {
    data: T;
    message?: string;
    details?: { code?: string } & Record<string, unknown>;
  };
  return { status: answer.status, code, message, data, details };
};
