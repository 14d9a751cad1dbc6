/** Converts a result to the stored answer of a key, to the partner's answer, or to the view of the command line. */
import type { AnswerEncoder, Answered } from '#payments';
import { type Answer, errorAnswer, openAnswer, successAnswer } from '#platform';

export const answerEncoder: AnswerEncoder = { success: successAnswer, failure: errorAnswer };

/** The answer to a partner. A stored answer is sent unchanged (C15). */
export const answerOf = (answered: Answered<unknown>): Answer =>
  'stored' in answered ? { ...answered.stored, replayed: true } : { ...successAnswer(answered.view), replayed: answered.replayed };

/** The view for the command line. If the stored answer is a refusal, throws its error again. */
export const viewOf = <View>(answered: Answered<View>): View => ('stored' in answered ? openAnswer<View>(answered.stored) : answered.view);
