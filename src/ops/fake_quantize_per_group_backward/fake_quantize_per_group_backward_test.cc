#include <gtest/gtest.h>

#include "oracle/oracle_test.h"

namespace bittern {
namespace {

TEST(FakeQuantizePerGroupBackward, MatchesRefEverywhere) {
  oracle::expect_parity("fake_quantize_per_group_backward");
}

}  // namespace
}  // namespace bittern
