/**
 * A decider: the whole of a concept as three pure parts. `decide` answers a command with the facts that follow from it (or refuses), `evolve`
 * folds one fact into the state. Every reader folds with the same `evolve`, so what was decided and what is shown cannot drift apart.
 */
export interface Decider<State, Command, Event> {
  readonly initial: State;
  readonly decide: (state: State, command: Command) => readonly Event[];
  readonly evolve: (state: State, event: Event) => State;
}

/** Replays facts onto a decider's initial state. */
export const fold = <State, Event>(
  decider: { readonly initial: State; readonly evolve: (state: State, event: Event) => State },
  events: Iterable<Event>,
): State => {
  let state = decider.initial;
  for (const event of events) state = decider.evolve(state, event);
  return state;
};

/** Marks a branch that the types rule out; reached only by a fault of ours. */
export const unreachable = (value: never): never => {
  throw new Error(`unhandled case: ${JSON.stringify(value)}`);
};
