#include <gtest/gtest.h>

#include "oracle/oracle_test.h"

namespace bittern {
namespace {

TEST(FakeQuantizePerGroup, MatchesRefEverywhere) {
  oracle::expect_parity("fake_quantize_per_group");
}

}  // namespace
}  // namespace bittern
