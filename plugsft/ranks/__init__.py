"""The processes of a run, and what they say to each other from its start to its end.

1. Each rank prepares its data, or finds it, before there is a process group: that may take hours.
   Meanwhile the ranks watch each other in the launcher's store (`failures.Watch`), and each says
   there that it is ready.
2. `connect.connect` makes the group. `agree.ensure_alike` compares recipe, plugins, data, output,
   model files and plan: two machines may see other files under one path.
3. Work that may fail on one rank is done inside `agree.agreed(operation)`; work with collectives,
   such as what plugins ask of the model, inside `together`.
4. Where the loop says `run.agreed`, as before each step, the same agreement also carries signals, a
   plugin's wish to stop, and failed notices (`stopping`). So all ranks learn of these at the same
   place, and the loop ends where it finds a reason.
5. Each step sums gradients, and in one more reduction its numbers, with a checksum of what must be
   equal on all ranks (`step_numbers`).
6. A rank that fails outside of an agreement writes its reason to the store and ends
   (`agree.ending_together`). The others lose their connection to it, or wait in a collective that
   no error reaches; their watch reads the reason, and ends them.

An agreement is one number, because that takes 0.4 ms, and exchanging texts up to 6. torchrun ends
all ranks of a machine when one has failed, but tells those of another machine nothing; hence the
store. A launcher's death reaches its ranks as a signal from the system (`launcher`).
"""
