#include <gtest/gtest.h>

#include "oracle/oracle_test.h"

namespace bittern {
namespace {

TEST(DequantizePerGroupBackward, MatchesRefEverywhere) {
  oracle::expect_parity("dequantize_per_group_backward");
}

}  // namespace
}  // namespace bittern
