#include <gtest/gtest.h>

#include "oracle/oracle_test.h"

namespace bittern {
namespace {

TEST(QdqAffineBackward, MatchesRefEverywhere) { oracle::expect_parity("qdq_affine_backward"); }

}  // namespace
}  // namespace bittern
