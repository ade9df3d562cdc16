from __future__ import annotations

import random

from slime_rl.buffer.ranked import RankedGroups


def test_it_agrees_with_sorting_a_dictionary() -> None:
    rng = random.Random(0)
    ranked, model = RankedGroups(), {}
    for _ in range(5000):
        group = rng.randrange(300)
        action = rng.random()
        if action < 0.6:
            model[group] = rng.randrange(20)
            ranked.add(group, model[group])
        elif action < 0.9:
            model.pop(group, None)
            ranked.discard(group)
        elif action < 0.95:
            bound = rng.randrange(5)
            assert sorted(ranked.pop_below(bound)) == sorted(g for g, key in model.items() if key < bound)
            model = {g: key for g, key in model.items() if key >= bound}
        else:
            skip = set(rng.sample(range(300), 50))
            expected = sorted((key, g) for g, key in model.items() if g not in skip)[:10]
            assert ranked.first(10, skip) == [g for _, g in expected]
        assert len(ranked) == len(model)


def test_groups_that_left_do_not_pile_up() -> None:
    ranked = RankedGroups()
    ranked.add(-1, -1)  # stays on top, so that nothing below it is ever popped
    for group in range(20_000):
        ranked.add(group, group)
        ranked.discard(group)
    assert len(ranked._heap) < 2000
