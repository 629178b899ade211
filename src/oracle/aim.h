// Puts inputs where kernels go wrong. A family's own aims are in its folder.
#pragma once
#include "core/blocks.h"
#include "oracle/oracle.h"

namespace bittern::oracle {

// Scales that are ordinary, powers of two, negative, and now and then 0, NaN, infinite or denormal.
void aim_scale(const ConstView& scale, Rng& rng);

// Terms of sums: mostly finite, since one NaN would hide every other mistake in a sum; sometimes
// all zeros of both signs, or all -0, which shows wrong padding.
void aim_gradient(const ConstView& d_y, Rng& rng);

// Sequences that cover the tokens, some of them empty.
void aim_sequences(const Sequences& s, const ConstView& cu_seqlens, Rng& rng);
// Mostly finite values of about the given size, since one NaN spoils its whole chunk.
void aim_values(const ConstView& x, double size, Rng& rng);

// A mask of ones with some zeros, if there is a mask.
void aim_mask(const ConstView& mask, Rng& rng);

// Rows of GGUF's blocks. Random bytes hold every code; of the scales they would make mostly odd
// numbers, so half of them become ordinary ones: then roundings and differences s q - m show.
void aim_blocks(BlockType type, const ConstView& blocks, Rng& rng);

}  // namespace bittern::oracle
