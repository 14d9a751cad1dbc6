/** Properties under mutation: the same cases for every change and in every run, and no search for a smaller one where a case fails. */
import fc from 'fast-check';

fc.configureGlobal({ seed: 1, endOnFailure: true });
