#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;

TEST(UnpackPanels, MatchesRefEverywhere) { oracle::expect_parity("unpack_panels"); }

// Random bytes of every operand, there and back, for all types.
TEST(UnpackPanels, BringsEveryBitBack) {
  oracle::Rng rng(1);
  for (const WeightDesc& d : oracle::Cases<UnpackPanels>::check()) {
    const auto bytes = [&](const Axes& shape, DType dtype) {
      std::vector<std::uint8_t> v(static_cast<std::size_t>(shape.numel()) * size_of(dtype));
      for (std::uint8_t& byte : v) byte = static_cast<std::uint8_t>(rng.next());
      return v;
    };
    PackPanels::Args to;
    UnpackPanels::Args from;
    std::vector<std::vector<std::uint8_t>> stored, back;
    std::vector<std::uint8_t> panels(static_cast<std::size_t>(d.panel_shape().numel()));
    const auto visit_all = [&](auto& args, auto& memory) {
      std::size_t i = 0;
      visit_stored_weights(d, args, true, [&](const char*, auto& v, const Operand& o) {
        v.dtype = o.dtype;
        v.shape = o.shape;
        v.stride = o.shape.dense_strides();
        if ((o.flags & Operand::kUnread) == 0) v.data = memory[i].data();
        ++i;
      });
    };
    visit_stored_weights(d, to, true, [&](const char*, auto&, const Operand& o) {
      const bool read = (o.flags & Operand::kUnread) == 0;
      stored.push_back(read ? bytes(o.shape, o.dtype) : std::vector<std::uint8_t>());
      back.emplace_back(stored.back().size(), std::uint8_t{0xee});
    });
    visit_all(to, stored);
    visit_all(from, back);
    to.panels = view(panels.data(), d.panel_shape());
    from.panels = view(std::as_const(panels).data(), d.panel_shape());
    for (const auto kernel : kBothKernels) {
      expect_ok(run_op<PackPanels>(d, to, kernel));
      expect_ok(run_op<UnpackPanels>(d, from, kernel));
      EXPECT_EQ(back, stored) << kWeightTypeNames[static_cast<std::size_t>(d.type)] << " " << d.bits
                              << " bits, " << d.outputs << " x " << d.inputs;
    }
  }
}

}  // namespace
}  // namespace bittern
