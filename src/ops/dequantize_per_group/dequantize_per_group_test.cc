#include <gtest/gtest.h>

#include "oracle/oracle_test.h"

namespace bittern {
namespace {

TEST(DequantizePerGroup, MatchesRefEverywhere) { oracle::expect_parity("dequantize_per_group"); }

}  // namespace
}  // namespace bittern
