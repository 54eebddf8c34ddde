"""Mutations of stage curate: shards, kept work, ledgers, the folder that is written."""

from __future__ import annotations

from mutation.table import Mutation

CURATE = "production/test_curate.py"
MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "production/work_files.py",
        "        return content if digest_of(content) == data[:_DIGEST_BYTES] else None",
        "        return content",
        CURATE,
        only="killed_at_any_write",
    ),
    Mutation(
        "production/shard_work.py",
        "        self._work.write(summary, json.dumps(parts).encode())",
        "        self._work.write(summary, json.dumps(parts[:1]).encode())",
        CURATE,
        only="killed_at_any_write",
    ),
    Mutation(
        "production/shard_work.py",
        'columns.get("document_ends") is False and following != row.place + 1',
        'columns.get("document_ends") is False and following < 0',
        CURATE,
        only="borders",
    ),
    Mutation(
        "production/shard_work.py",
        "line = content.line(number) if texts is None else columns.line_with(texts)",
        "line = columns.line_with(texts or [each.text for each in columns.places])",
        CURATE,
        only="stands_as_it_came",
    ),
    Mutation(
        "production/shard_work.py",
        "if (missing := np.flatnonzero(at < 0)).size:",
        "if (missing := np.arange(len(at))).size:",
        CURATE,
        only="measures_nothing_again",
    ),
    Mutation(
        "production/curate.py",
        "        self._past = key_of(before, [decisions_key(step) for step in self._steps[first:stop]], conclusion)",
        "        self._past = key_of(before, [step.name for step in self._steps[first:stop]])",
        CURATE,
        only="other_settings",
    ),
    Mutation(
        "production/curate.py",
        "        return {shard: results[shard] for shard in sorted(results, key=lambda shard: shard.number)}",
        "        return results",
        CURATE,
        only="shuffles_repeats",
    ),
    Mutation(
        "production/shards.py",
        "            first, lines, where, bad, size = row.index + 1, [], [], {}, 0",
        "            first, lines, where, bad, size = row.index, [], [], {}, 0",
        CURATE,
        only="size_of_shards",
    ),
    Mutation(
        "data/row_texts.py",
        '        result.append(replace(text, role="repeated") if known else text)',
        "        result.append(text)",
        "data/test_row_texts.py",
    ),
    Mutation(
        "data/sources.py",
        "        and not (file.parent / DATA_CARD).is_file()  # a card",
        "        and file.is_file()  # a card",
        CURATE,
        only="folder_is_a_source",
    ),
    Mutation(
        "curation/near_duplicates.py",
        "            return connected(np.concatenate([np.stack(part, axis=1) for part in parts]))",
        '            return merge_tables(conclusions, ["place"])',
        "curation/test_near_duplicates.py",
    ),
)
