/**
 * Settings of fast-check in mutation runs: the same cases for every change and in every run. After a failure there is no search for a smaller case.
 */
import fc from 'fast-check';

fc.configureGlobal({ seed: 1, endOnFailure: true });
