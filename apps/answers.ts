/** The form of answers. One function writes a result for its key, one sends it to a partner, one reads it again for the command line. */
import type { AnswerEncoder, Answered } from '#payments';
import { type Answer, errorAnswer, openAnswer, successAnswer } from '#platform/http';

export const answerEncoder: AnswerEncoder = { success: successAnswer, failure: errorAnswer };

/** The answer to a partner. A stored answer is sent unchanged (C15). */
export const answerOf = (answered: Answered<unknown>): Answer =>
  'stored' in answered ? { ...answered.stored, replayed: true } : { ...successAnswer(answered.view), replayed: answered.replayed };

/** The result for the command line. A stored refusal is thrown again. */
export const viewOf = <View>(answered: Answered<View>): View => ('stored' in answered ? openAnswer<View>(answered.stored) : answered.view);
