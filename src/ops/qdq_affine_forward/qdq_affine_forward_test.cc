#include <gtest/gtest.h>

#include "oracle/oracle_test.h"

namespace bittern {
namespace {

TEST(QdqAffineForward, MatchesRefEverywhere) { oracle::expect_parity("qdq_affine_forward"); }

}  // namespace
}  // namespace bittern
