/**
 * A decider: a concept as three pure parts. `decide` answers a command with the events that follow from it, or refuses. `evolve` folds one event into
 * the state. Every reader folds with the same `evolve`, so decisions and answers cannot drift apart.
 */
export interface Decider<State, Command, Event> {
  readonly initial: State;
  readonly decide: (state: State, command: Command) => readonly Event[];
  readonly evolve: (state: State, event: Event) => State;
}

/** Folds events onto a decider's initial state. */
export const fold = <State, Event>(
  decider: { readonly initial: State; readonly evolve: (state: State, event: Event) => State },
  events: Iterable<Event>,
): State => {
  let state = decider.initial;
  for (const event of events) state = decider.evolve(state, event);
  return state;
};

/** Marks a branch that the types rule out. Only our own fault reaches it. */
export const unreachable = (value: never): never => {
  throw new Error(`unhandled case: ${JSON.stringify(value)}`);
};
