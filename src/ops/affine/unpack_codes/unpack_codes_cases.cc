#include "oracle/oracle.h"

namespace bittern::oracle {

std::vector<PackDesc> unpack_codes_check_cases() {
  std::vector<PackDesc> cases;
  for (std::int32_t bits = 1; bits <= 8; ++bits) {
    for (const std::int64_t axis : {0, 1, 7, 8, 31, 32, 33, 63, 64, 65, 127, 160, 200, 1000, 4133})
      cases.push_back({.outer_size = 3, .axis_size = axis, .bits = bits});
    cases.push_back({.outer_size = 0, .axis_size = 64, .bits = bits});
  }
  // Large enough for streaming stores, with rows of several chunks and a tail.
  cases.push_back({.outer_size = 110, .axis_size = 9999, .bits = 3});
  return cases;
}

std::vector<BenchCase<PackDesc>> unpack_codes_bench_cases() {
  return {{"4 bit", {.outer_size = 8192, .axis_size = 4096, .bits = 4}},
          {"3 bit", {.outer_size = 8192, .axis_size = 4096, .bits = 3}},
          {.label = "4 bit 16384x8192",
           .desc = {.outer_size = 16384, .axis_size = 8192, .bits = 4},
           .gpu_only = true},
          {.label = "3 bit 16384x8192",
           .desc = {.outer_size = 16384, .axis_size = 8192, .bits = 3},
           .gpu_only = true}};
}

// Random words already hold every code at every place, and spare bits that are not zero.
void unpack_codes_aim(const PackDesc&, const UnpackCodes::Args&, Rng&) {}

}  // namespace bittern::oracle
