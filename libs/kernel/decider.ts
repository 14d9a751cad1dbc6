/**
 * A decider describes one concept by three pure parts. `initial` is the first state. `decide` answers a command with the events that follow from it,
 * or throws a refusal. `evolve` folds one event into the state. Commands and queries fold with the same `evolve`, so they always see the same state.
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

/** Marks a branch that the types rule out. If it is reached, our own code has a fault. */
export const unreachable = (value: never): never => {
  throw new Error(`unhandled case: ${JSON.stringify(value)}`);
};
