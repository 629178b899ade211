#include <gtest/gtest.h>

#include "oracle/oracle_test.h"

namespace bittern {
namespace {

TEST(QdqAffineInit, MatchesRefEverywhere) { oracle::expect_parity("qdq_affine_init"); }

}  // namespace
}  // namespace bittern
