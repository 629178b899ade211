// Plain functions around decoding: frequencies of rope, and the next token.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "binding.h"
#include "bittern/rope_frequencies.h"
#include "bittern/sample.h"
#include "tensor.h"

namespace bittern {

void bind_decoding(nb::module_& m) {
  m.def("rope_frequencies", [](std::int64_t rotary_dim, double base, std::int32_t kind,
                               double factor, double original_context, double low_freq_factor,
                               double high_freq_factor, double beta_fast, double beta_slow,
                               double attention_factor, double mscale, double mscale_all_dim,
                               bool truncate) {
    auto made =
        checked(rope_frequencies(rotary_dim, base,
                                 {static_cast<RopeScalingKind>(kind), factor, original_context,
                                  low_freq_factor, high_freq_factor, beta_fast, beta_slow,
                                  attention_factor, mscale, mscale_all_dim, truncate}));
    const std::size_t count = made.inverse.size();
    return nb::make_tuple(to_numpy(std::move(made.inverse), {count}), made.factor);
  });
  m.def(
      "sample",
      [](const nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>& logits,
         const std::vector<std::int32_t>& history, double temperature, std::int64_t top_k,
         double top_p, double min_p, double repetition_penalty, std::uint64_t seed,
         std::uint64_t step) {
        return checked(sample({logits.data(), logits.size()}, history,
                              {temperature, top_k, top_p, min_p, repetition_penalty, seed}, step));
      });
}

}  // namespace bittern
