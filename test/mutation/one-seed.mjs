/** Settings of fast-check in mutation runs: every run has the same cases. After a failure there is no search for a smaller case. */
import fc from 'fast-check';

fc.configureGlobal({ seed: 1, endOnFailure: true });
