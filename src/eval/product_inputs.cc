#include "eval/product_inputs.h"

namespace bittern {

std::optional<ProductSource> input_of(Q quantity) {
  switch (quantity) {
    case Q::q:
    case Q::k:
    case Q::v:
    case Q::delta_q:
    case Q::delta_k:
    case Q::delta_v:
    case Q::delta_z:
    case Q::delta_b:
    case Q::delta_a: return ProductSource{ProductPlace::mixer_in};
    case Q::o:
    case Q::delta_out: return ProductSource{ProductPlace::mixer_out};
    case Q::gate:
    case Q::up:
    case Q::router:
    case Q::shared_router:
    case Q::shared_gate:
    case Q::shared_up: return ProductSource{ProductPlace::mlp_in};
    case Q::down: return ProductSource{ProductPlace::mlp_down};
    case Q::shared_down: return ProductSource{.place = ProductPlace::mlp_down, .shared = true};
    case Q::gate_experts:
    case Q::up_experts: return ProductSource{.place = ProductPlace::mlp_in, .experts = true};
    case Q::down_experts: return ProductSource{.place = ProductPlace::mlp_down, .experts = true};
    default: return {};
  }
}

}  // namespace bittern
