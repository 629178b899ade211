#include <gtest/gtest.h>

#include "oracle/oracle_test.h"

namespace bittern {
namespace {

TEST(UnpackCodes, MatchesRefEverywhere) { oracle::expect_parity("unpack_codes"); }

}  // namespace
}  // namespace bittern
