"""The sizes by which the mixing of tokens chooses its kernels, fills rows up and goes in groups. Imports no torch."""

# On CPU, documents up to this length, and branches with no more scores, are done by `block_attention.BlockAttention`:
# the backward pass of torch's flash kernel is slow for short rows (161 tokens, 8 heads of 32, bf16, two threads: 2.8 ms
# against 1.1 ms; equal near 800 tokens), and a branch wants a mask of it (64 tokens behind 512, 8 heads of 64, bf16,
# one thread: 5.6 ms against 3.2 ms; 1024 behind 1024 are equal).
SHORT_DOCUMENT = 768
# Documents for torch's kernel are filled up to a multiple of this. Every new shape of product makes oneDNN generate
# code and keep it, which with documents of any length takes time and memory in every step (a 7M model in bf16, packs of
# 2048: 820 MiB after 100 steps instead of 1660, and a tenth faster).
DOCUMENT_MULTIPLE = 64
# Larger blocks compute more above the diagonal, smaller ones are more calls: forward and backward took 0.7 to 1.0 of
# the time of 256 rows with documents of 200 to 700 tokens, and 64 rows up to 1.5 of that of 128 (bf16 and float32,
# 8 heads of 32 to 32 of 128, one and two threads of a Zen 4, 2026-11).
BLOCK_ROWS = 128
# Blocks of query rows are filled up to a multiple of this: see DOCUMENT_MULTIPLE.
ROW_MULTIPLE = 32
# Rows of a long branch that one call of torch's kernel takes: it needs a mask, and looks at all of it.
BRANCH_ROWS = 512
# Tokens of a chunk of the delta rule: the first that holds the longest run, else the last.
CHUNK_SIZES = (16, 32, 64)
# Elements of the keys of a group of heads of the delta rule. Groups are processed one after the other, so that their
# tensors fit into caches and never exist for all heads at once.
GROUP_ELEMENTS = 1 << 17
