/**
 * The three pure parts of one concept. `initial` is the first state. `decide` returns the events that follow from a command, or throws a refusal.
 * `evolve` returns the state after an event.
 *
 * Commands and queries use the same `evolve`.
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

/** Marks a branch that the types make impossible. Throws if the program reaches the branch. */
export const unreachable = (value: never): never => {
  throw new Error(`unhandled case: ${JSON.stringify(value)}`);
};
