/** Conversions of a result: to the answer that is stored for a key, to the answer for a partner, and to the view for the command line. */
import type { AnswerEncoder, Answered } from '#payments';
import { type Answer, errorAnswer, openAnswer, successAnswer } from '#platform/http';

export const answerEncoder: AnswerEncoder = { success: successAnswer, failure: errorAnswer };

/** The answer to a partner. A stored answer is sent unchanged (C15). */
export const answerOf = (answered: Answered<unknown>): Answer =>
  'stored' in answered ? { ...answered.stored, replayed: true } : { ...successAnswer(answered.view), replayed: answered.replayed };

/** The result for the command line. If the stored answer is a refusal, its error is thrown again. */
export const viewOf = <View>(answered: Answered<View>): View => ('stored' in answered ? openAnswer<View>(answered.stored) : answered.view);
