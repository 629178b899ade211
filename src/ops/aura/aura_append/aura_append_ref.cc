#include <cmath>
#include <vector>

#include "bittern/ops/aura_append.h"
#include "core/rope.h"
#include "ops/aura/aura_append/sides.h"
#include "ops/aura/encode_ref.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = AuraAppend;
using Row = std::vector<float>;

template <class X>
void turn(const Op::Desc& d, const Op::Args& a, std::int64_t token, Row& row) {
  const std::int64_t half = d.rotary_dim / 2;
  for (std::int64_t i = 0; i < half; ++i) {
    const RopeTurn by =
        rope_turn(a.positions.as<std::int32_t>()[token], a.inverse_frequencies.as<float>()[i],
                  static_cast<float>(d.factor));
    const auto [first, second] = rope_pair(i, half, d.interleaved);
    float &x_a = row[static_cast<std::size_t>(first)], &x_b = row[static_cast<std::size_t>(second)];
    const float y_a = by.first(x_a, x_b), y_b = by.second(x_a, x_b);
    x_a = to_math(from_math<X>(y_a));
    x_b = to_math(from_math<X>(y_b));
  }
}

// row := row - mean; true if it had to be halved.
bool centre(const float* mean, Row& row) {
  bool overflow = false;
  for (std::size_t j = 0; j < row.size(); ++j)
    overflow = overflow || (std::isfinite(row[j]) && std::isinf(row[j] - mean[j]));
  for (std::size_t j = 0; j < row.size(); ++j)
    row[j] = overflow ? row[j] / 2 - mean[j] / 2 : row[j] - mean[j];
  return overflow;
}

// Head `head` of a token, of K or V.
template <class X, class E, class N>
void append_row(const Op::Desc& d, const Op::Args& a, const append::Side& side, std::int64_t token,
                std::int64_t head, Row& x, std::vector<std::uint32_t>& codes) {
  for (std::int64_t j = 0; j < d.dim; ++j)
    x[static_cast<std::size_t>(j)] = to_math(side.x.as<X>()[side.x.at(token, head, j)]);
  if (side.is_k) turn<X>(d, a, token, x);
  if (d.kept > 0)
    for (float& value : x) value = to_math(from_math<E>(value));
  if (const std::int64_t r = d.kept > 0 ? a.kept_slots.as<std::int32_t>()[token] : -1; r >= 0) {
    E* kept = side.kept.as<E>() + side.kept.at(r / d.kept, head, r % d.kept);
    for (std::int64_t j = 0; j < d.dim; ++j) {
      const float value = to_math(kept[j]);
      kept[j] = from_math<E>(x[static_cast<std::size_t>(j)]);
      x[static_cast<std::size_t>(j)] = value;
    }
  }
  const std::int64_t n = a.slots.as<std::int32_t>()[token];
  if (n < 0) return;
  const bool halved = side.mean != nullptr && centre(side.mean + head * d.dim, x);
  float s = stored_scale<float>(
      encode_row(side.coding, side.table, side.boundaries, side.codebook, x.data(), codes.data()));
  if (halved) s = stored_scale<float>(2 * s);
  const std::int64_t page = n / d.page_size, row = head * d.page_size + n % d.page_size;
  pack_row(side.coding, codes.data(),
           side.packed.as<std::uint32_t>() + page * side.packed.row_stride() +
               row * packed_words(d.dim, side.coding.bits));
  side.scales.as<N>()[page * side.scales.row_stride() + row] = stored_scale<N>(s);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    return visit<float, f16, bf16>(d.exact, [&]<class E>(Type<E>) {
      return visit<float, f16>(d.scale_element(), [&]<class N>(Type<N>) {
        Row row(static_cast<std::size_t>(d.dim));
        std::vector<std::uint32_t> codes(row.size());
        for (const append::Side& side : {append::k_side(d, a), append::v_side(d, a)})
          for (std::int64_t t = 0; t < d.tokens; ++t)
            for (std::int64_t h = 0; h < d.kv_heads; ++h)
              append_row<X, E, N>(d, a, side, t, h, row, codes);
        return Status();
      });
    });
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<AuraAppend>> aura_append_ref() { return kKernels; }

}  // namespace bittern
