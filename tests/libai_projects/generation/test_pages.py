"""Which pages sequences have: by a model of them that keeps each sequence's tokens apart."""

from __future__ import annotations

import numpy as np

from libai_projects.models.pages import PagedCache


def pages_of(cache: PagedCache, number: int) -> list[int]:
    return [page for page in cache.tables([number])[0].tolist() if page >= 0]


def test_equal_beginnings_share_whole_pages() -> None:
    tokens = list(range(200))
    cache = PagedCache(8)
    first, _ = cache.add(tokens)
    cache.extend(first, 200)
    assert cache.add(tokens, share=True)[1] == 0
    cache.remember(first, tokens)
    for prompt, known in (
        (tokens, 192),
        (tokens[:192], 128),
        (tokens[:193], 192),
        ([*tokens[:130], 7], 128),
        ([7, *tokens[1:]], 0),
        (tokens[:64], 0),
        ([], 0),
    ):
        number, found = cache.add(prompt, share=True)
        assert (found, cache.length(number)) == (known, known)
        assert pages_of(cache, number) == pages_of(cache, first)[: known // 64]
        cache.release(number)
    assert cache.add(tokens)[1] == 0


def test_random_use_loses_no_page_and_gives_none_to_two() -> None:
    """Contents of pages, as tensors would have them, are those of each sequence."""
    rng = np.random.default_rng(0)
    cache, shared = PagedCache(12), 0
    contents: dict[int, dict[int, int]] = {}
    texts: dict[int, list[int]] = {}
    for _ in range(2000):
        action = rng.integers(4)
        if action == 0 and len(texts) < 6:
            tokens = [0] * int(rng.integers(1, 200))
            number, known = cache.add(tokens, share=True)
            texts[number], shared = tokens[:known], shared + known
        elif texts:
            number = int(rng.choice(list(texts)))
            if action == 1:
                cache.remember(number, texts[number])
                cache.release(number)
                del texts[number]
            elif action == 2 and len(texts) < 6:
                texts[cache.fork(number)] = list(texts[number])
            else:
                new = [int(rng.random() < 0.2)] * int(rng.integers(1, 70))
                before = cache.free
                needed = cache.pages_needed({number: len(new)})
                if needed > before:
                    continue
                cache.extend(number, len(new))
                assert cache.free == before - needed
                for origin, copy in cache.take_copies().tolist():
                    contents[copy] = dict(contents[origin])
                table = pages_of(cache, number)
                for place, token in enumerate(new, len(texts[number])):
                    contents.setdefault(table[place // 64], {})[place % 64] = token
                texts[number] += new
        for number, text in texts.items():
            table = pages_of(cache, number)
            assert [contents[table[i // 64]][i % 64] for i in range(len(text))] == text
    for number in texts:
        cache.release(number)
    assert shared
    assert (cache.free, cache.pages) == (12, 12)
