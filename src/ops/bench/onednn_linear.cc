#include "ops/bench/onednn_linear.h"

#if DI_HAVE_ONEDNN
#include <omp.h>

#include <cstring>
#include <dnnl.hpp>
#include <exception>
#include <unordered_map>
#include <vector>
#endif

namespace deepinfer {

#if DI_HAVE_ONEDNN

struct OnednnLinear::Impl {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  dnnl::matmul matmul;
  dnnl::memory x;
  dnnl::memory y;
  std::vector<dnnl::memory> weights;
  size_t next = 0;
  int threads = 1;
};

Result<OnednnLinear> OnednnLinear::Create(int64_t m, int64_t n, int64_t k, int64_t copies,
                                          int threads) {
  try {
    using Tag = dnnl::memory::format_tag;
    using Type = dnnl::memory::data_type;
    OnednnLinear linear;
    linear.impl_ = std::make_unique<Impl>();
    Impl& impl = *linear.impl_;
    impl.threads = threads;
    omp_set_num_threads(threads);
    std::string chosen;
    for (const Type type : {Type::bf16, Type::f32}) {
      try {
        const dnnl::memory::desc x({m, k}, type, Tag::ab);
        const dnnl::memory::desc weights({k, n}, type, Tag::any);
        const dnnl::memory::desc y({m, n}, type, Tag::ab);
        const dnnl::matmul::primitive_desc description({x, weights, y}, impl.engine);
        const std::string name = description.impl_info_str();
        // The plain loops of oneDNN are no comparison.
        if (type == Type::bf16 && name.find("ref") != std::string::npos) continue;
        impl.matmul = dnnl::matmul(description);
        impl.x = dnnl::memory(description.src_desc(), impl.engine);
        impl.y = dnnl::memory(description.dst_desc(), impl.engine);
        dnnl::memory plain({{k, n}, type, Tag::ba}, impl.engine);
        const auto fill = [&](const dnnl::memory& memory) {
          const size_t count = memory.get_desc().get_size() / (type == Type::bf16 ? 2 : 4);
          for (size_t i = 0; i < count; ++i) {
            const float value = static_cast<float>(i % 61) * 0.03125f - 0.9375f;
            if (type == Type::bf16) {
              uint32_t bits = 0;
              std::memcpy(&bits, &value, 4);
              static_cast<uint16_t*>(memory.get_data_handle())[i] =
                  static_cast<uint16_t>(bits >> 16);
            } else {
              static_cast<float*>(memory.get_data_handle())[i] = value;
            }
          }
        };
        fill(impl.x);
        fill(plain);
        for (int64_t copy = 0; copy < copies; ++copy) {
          dnnl::memory packed(description.weights_desc(), impl.engine);
          dnnl::reorder(plain, packed).execute(impl.stream, plain, packed);
          impl.weights.push_back(packed);
        }
        impl.stream.wait();
        chosen = fmt::format("{} {}", type == Type::bf16 ? "bf16" : "f32", name);
        break;
      } catch (const dnnl::error&) {
        if (type == Type::f32) throw;
      }
    }
    const dnnl_version_t* version = dnnl_version();
    linear.name_ =
        fmt::format("oneDNN {}.{}.{} {}", version->major, version->minor, version->patch, chosen);
    return linear;
  } catch (const std::exception& error) {
    return Fail(Code::kInternal, fmt::format("oneDNN cannot run this matmul: {}.", error.what()));
  }
}

Status OnednnLinear::Run() {
  try {
    Impl& impl = *impl_;
    omp_set_num_threads(impl.threads);
    impl.matmul.execute(impl.stream, {{DNNL_ARG_SRC, impl.x},
                                      {DNNL_ARG_WEIGHTS, impl.weights[impl.next]},
                                      {DNNL_ARG_DST, impl.y}});
    impl.stream.wait();
    impl.next = (impl.next + 1) % impl.weights.size();
    return {};
  } catch (const std::exception& error) {
    return Fail(Code::kInternal, fmt::format("oneDNN failed in a matmul: {}.", error.what()));
  }
}

#else

struct OnednnLinear::Impl {};

Result<OnednnLinear> OnednnLinear::Create(int64_t, int64_t, int64_t, int64_t, int) {
  return Fail(Code::kUnsupported, "This build has no oneDNN to compare with.");
}

Status OnednnLinear::Run() {
  return Fail(Code::kUnsupported, "This build has no oneDNN to compare with.");
}

#endif

OnednnLinear::OnednnLinear() = default;
OnednnLinear::OnednnLinear(OnednnLinear&&) noexcept = default;
OnednnLinear::~OnednnLinear() = default;

}  // namespace deepinfer
