#include <gtest/gtest.h>

#include "oracle/oracle_test.h"

namespace bittern {
namespace {

TEST(QuantizePerGroupBackward, MatchesRefEverywhere) {
  oracle::expect_parity("quantize_per_group_backward");
}

}  // namespace
}  // namespace bittern
