#include <gtest/gtest.h>

#include "oracle/oracle_test.h"

namespace bittern {
namespace {

TEST(DynamicQuantize, MatchesRefEverywhere) { oracle::expect_parity("dynamic_quantize"); }

}  // namespace
}  // namespace bittern
