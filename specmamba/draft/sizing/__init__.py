"""How large drafts are: as large as pays, by the whole batch, decided again and again while requests run.

`DraftSizer` (`sizer.py`) is what an engine has: it plans a round of steps, and learns from it at its end.

- *Predicted* is the time of a step: `costs.py` knows what was measured at the start (`cost_file.py` keeps it) and what
  moving `ratios.py` say of it since; `present_times.py` has the times of steps of the present requests.
- *Learned* is what drafts bring: `expected_tokens.py`, from drafts of these requests and of `earlier.py` ones;
  `repeats.py` hears in a text that drafts would pay.
- *Decided* is the depth and form of drafts, in `schedule.py`, with tries of other options (`tries.py`) within what
  drafts may lose (`allowance.py`); and the nodes of each step, in `tree_choice.py`.
- *Reported* is what was decided (`SizerFigures` in `rounds.py`, which has the values of all of them).

`drafts.py` puts drafts of these sizes into steps, `rank_sizers.py` tells all ranks of a model the same.
"""
