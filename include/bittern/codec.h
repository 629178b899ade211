// Tables of the KV codec: codebooks and rotations. They are made only with + - * / and sqrt, in a
// fixed order, so every platform makes the same bytes.
//
// A coordinate of a random unit vector in R^d has the density
//
//   f_d(x) = C_d (1 - x^2)^((d-3)/2) on [-1, 1],   C_2 = 1/pi, C_3 = 1/2, C_{d+2} = C_d d/(d-1)
//
// The codebook with the least squared error for it is the fixed point c_i = E[x | cell i], where
// the cells are cut half-way between neighbours (Lloyd-Max). docs/kv_codec.md has the formulas.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "bittern/aura_desc.h"

namespace bittern {

struct Codebook {
  std::vector<float> levels;      // 2^bits, ascending: aura's `codebook`
  std::vector<float> boundaries;  // 2^bits - 1, half-way between neighbours
  // Expected |u - u'|^2 of a random unit vector u in R^dim and its nearest levels u' (rule none);
  // NaN for a user's table, whose dim is not known.
  double distortion = 0;
};

// The exact optimum for dim 2..1024 and bits 1..8.
Result<Codebook> sphere_codebook(std::int64_t dim, std::int32_t bits) noexcept;

// The optimum for N(0, 1/dim), the limit of large dim; its distortion is that on N(0, 1/dim).
Result<Codebook> gaussian_codebook(std::int64_t dim, std::int32_t bits) noexcept;

// A user's levels: 2^bits of them, bits 1..8, finite, ascending (equal neighbours are refused).
Result<Codebook> user_codebook(std::span<const float> levels) noexcept;

// f32(a/2 + b/2) for each pair of neighbours, computed in f64.
Result<std::vector<float>> midpoints(std::span<const float> levels) noexcept;

// Expected |u - u'|^2 of a random unit vector in R^dim quantised by any sorted table.
Result<double> sphere_distortion(std::int64_t dim, std::span<const float> levels,
                                 std::span<const float> boundaries) noexcept;

// The table of a rotation: nothing for identity, dim signs for hadamard, P [dim, dim] for dense.
//
//   hadamard   z = mix(seed + G), then state = z | 1. For each sign: state ^= state << 13,
//              state ^= state >> 7, state ^= state << 17; + if its lowest bit is set, - if not.
//              This is AURA's recipe, so seed = layer number gives AURA's signs.
//   dense      a d x d matrix of Gaussians, row by row, orthonormalised row by row (QR with a
//              positive diagonal: a Haar rotation). Uniforms are u = (mix(seed + G (i+1)) >> 11)
//              2^-52 - 1, i = 0, 1, ...; two of them, a b, with 0 < s = a^2 + b^2 < 1 give the
//              Gaussians a w and b w, w = sqrt(-2 log(s) / s); other pairs are skipped.
//
// G = 0x9E3779B97F4A7C15; mix is SplitMix64's finaliser.
Result<std::vector<float>> make_rotation(Rotation rotation, std::int64_t dim,
                                         std::uint64_t seed) noexcept;

}  // namespace bittern
