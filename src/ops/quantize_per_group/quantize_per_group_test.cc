#include <gtest/gtest.h>

#include "oracle/oracle_test.h"

namespace bittern {
namespace {

TEST(QuantizePerGroup, MatchesRefEverywhere) { oracle::expect_parity("quantize_per_group"); }

}  // namespace
}  // namespace bittern
