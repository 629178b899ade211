#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

TEST(AuraAttention, MatchesRefEverywhere) { oracle::expect_parity("aura_attention"); }

}  // namespace
}  // namespace bittern
