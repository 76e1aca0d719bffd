// Builds without CUDA: the CUDA half of every operation says so. Unreachable in practice, since
// such a build cannot create a CUDA stream.
#include "ops/cache_records/cache_records_impl.h"
#include "ops/compressor/compressor_impl.h"
#include "ops/draft_block/draft_block_impl.h"
#include "ops/embedding/embedding_impl.h"
#include "ops/engram/engram_impl.h"
#include "ops/gated_linear/gated_linear_impl.h"
#include "ops/gather_rows/gather_rows_impl.h"
#include "ops/hyper_connection/hc_collapse_impl.h"
#include "ops/hyper_connection/hyper_connection_impl.h"
#include "ops/indexer/indexer_impl.h"
#include "ops/latent_inputs/latent_inputs_impl.h"
#include "ops/linear/linear_impl.h"
#include "ops/moe/moe_impl.h"
#include "ops/quantize/quantize_impl.h"
#include "ops/rms_norm/rms_norm_impl.h"
#include "ops/rope/rope_impl.h"
#include "ops/sample_rows/sample_rows_impl.h"
#include "ops/sparse_attention/sparse_attention_impl.h"

namespace deepinfer::cuda {
namespace {

tl::unexpected<Error> Absent() {
  return Fail(Code::kUnsupported, "This build of DeepInfer has no CUDA backend.", "device");
}

}  // namespace

Status WindowRecords(const WindowRecordsArgs&, Stream&) {
  return Absent();
}
Status WriteWindowPages(const WriteWindowPagesArgs&, Stream&) {
  return Absent();
}
Status WriteEntries(const WriteEntriesArgs&, Stream&) {
  return Absent();
}
Status CompressPairs(const CompressPairsArgs&, Stream&) {
  return Absent();
}
Status SampleRows(const SampleRowsArgs&, Stream&) {
  return Absent();
}
Status BlockRows(const BlockRowsArgs&, Stream&) {
  return Absent();
}
Status BiasedArgmax(const BiasedArgmaxArgs&, Stream&) {
  return Absent();
}
Status PlaceSampledTokens(const PlaceSampledTokensArgs&, Stream&) {
  return Absent();
}
Status BlockConfidence(const BlockConfidenceArgs&, Stream&) {
  return Absent();
}
Status Embedding(const EmbeddingArgs&, Stream&) {
  return Absent();
}
Status EngramHash(const EngramHashArgs&, Stream&) {
  return Absent();
}
Status EngramGather(const EngramGatherArgs&, Stream&) {
  return Absent();
}
Status EngramApply(const EngramApplyArgs&, Stream&) {
  return Absent();
}
Status GatedLinear(const GatedLinearArgs&, Stream&) {
  return Absent();
}
Status GatherRows(const GatherRowsArgs&, Stream&) {
  return Absent();
}
Status HcCollapse(const HcCollapseArgs&, Stream&) {
  return Absent();
}
Status HcMix(const HcMixArgs&, Stream&) {
  return Absent();
}
Status HcCollapseNorm(const HcCollapseNormArgs&, Stream&) {
  return Absent();
}
Status HcExpand(const HcExpandArgs&, Stream&) {
  return Absent();
}
Status HcBoundary(const HcBoundaryArgs&, Stream&) {
  return Absent();
}
Status Indexer(const IndexerArgs&, Stream&) {
  return Absent();
}
Status LatentInputs(const LatentInputsArgs&, Stream&) {
  return Absent();
}
Status GroupedLinear(const GroupedLinearArgs&, Stream&) {
  return Absent();
}
Status RouterSelect(const RouterSelectArgs&, Stream&) {
  return Absent();
}
Status GroupByExpert(const GroupByExpertArgs&, Stream&) {
  return Absent();
}
Status Swiglu(const SwigluArgs&, Stream&) {
  return Absent();
}
Status MoeCombine(const MoeCombineArgs&, Stream&) {
  return Absent();
}
Status QuantizeFp8(const QuantizeFp8Args&, Stream&) {
  return Absent();
}
Status RmsNorm(const RmsNormArgs&, Stream&) {
  return Absent();
}
Status RopeTable(const RopeTableArgs&, Stream&) {
  return Absent();
}
Status Rope(const RopeArgs&, Stream&) {
  return Absent();
}
Status SparseAttention(const SparseAttentionArgs&, Stream&) {
  return Absent();
}
Status Route(const RouteArgs&, Stream&) {
  return Absent();
}
Status RouteExperts(const RouterSelectArgs&, const GroupByExpertArgs&, Stream&) {
  return Absent();
}
Status LinearBatch(std::span<const LinearArgs>, Stream&) {
  return Absent();
}
Result<std::vector<LinearWeight>> PackLinearStack(std::span<const LinearSource>, Stream&) {
  return Absent();
}

}  // namespace deepinfer::cuda
