#include "ops/affine/pack_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::kBothKernels;
using oracle::unpack;

TEST(UnpackCodes, MatchesRefEverywhere) { oracle::expect_parity("unpack_codes"); }

TEST(UnpackCodes, ReadsFromTheLowestBitOn) {
  for (const auto kernel : kBothKernels) {
    EXPECT_EQ(unpack({0x92E5173Au}, 8, 4, kernel),
              (std::vector<std::uint8_t>{0xA, 3, 7, 1, 5, 0xE, 2, 9}));
    EXPECT_EQ(unpack({02107654321u | 3u << 30, 1}, 11, 3, kernel),
              (std::vector<std::uint8_t>{1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 7}));
    EXPECT_EQ(unpack({0x44332211u, 0x55u}, 5, 8, kernel),
              (std::vector<std::uint8_t>{0x11, 0x22, 0x33, 0x44, 0x55}));
  }
}

TEST(UnpackCodes, SpareBitsAreIgnored) {
  for (const auto kernel : kBothKernels)
    EXPECT_EQ(unpack({0xfffffff5u}, 1, 4, kernel), std::vector<std::uint8_t>{5});
}

TEST(UnpackCodes, ErrorsNameTheFieldAndLeaveTheOutputAlone) {
  oracle::expect_pack_errors<UnpackCodes>();
}

}  // namespace
}  // namespace bittern
