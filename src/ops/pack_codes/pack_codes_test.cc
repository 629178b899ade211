#include <gtest/gtest.h>

#include "oracle/oracle_test.h"

namespace bittern {
namespace {

TEST(PackCodes, MatchesRefEverywhere) { oracle::expect_parity("pack_codes"); }

}  // namespace
}  // namespace bittern
