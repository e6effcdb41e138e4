// The dense operations of cadre train on a GPU against those on the CPU. What has the CPU's order
// of sums has its bits; the rest is near.
#include <cmath>
#include <functional>

#include "apps/train/adamw.h"
#include "apps/train/buffer.h"
#include "apps/train/cross_entropy.h"
#include "cadre/error.h"
#include "tests/apps/train/differences.h"
#include "tests/cuda/mirror.h"

namespace cadre::train {
namespace {

using test::first_gpu;
using test::normals;
using TrainEngine = test::OnDevice;

/// An array of an engine's memory with the values of a host's.
template <class T>
Buffer<T> put(Engine& engine, const std::vector<T>& values) {
  Buffer<T> buffer(engine, std::ssize(values));
  engine.upload(buffer.data(), values.data(), buffer.bytes());
  return buffer;
}

template <class T>
std::vector<T> get(Engine& engine, const Buffer<T>& buffer) {
  std::vector<T> values(size_t(buffer.size()));
  engine.download(values.data(), buffer.data(), buffer.bytes());
  return values;
}

/// What an output holds before it is written.
Buffer<float> poisoned(Engine& engine, int64_t count) {
  return put(engine, std::vector<float>(size_t(count), NAN));
}

using Numbers = std::vector<float>;
using Work = std::function<Numbers(Engine&)>;

Numbers on_gpu(const Work& work) {
  const auto gpu = open_engine(first_gpu());
  const Numbers got = work(*gpu);
  EXPECT_EQ(work(*gpu), got) << "a second call gave other bits";
  return got;
}

void expect_equal(const Work& work) { EXPECT_EQ(on_gpu(work), work(*open_engine(this_cpu()))); }

/// Every element within `bound` times one plus its magnitude.
void expect_near(double bound, const Work& work) {
  const Numbers want = work(*open_engine(this_cpu())), got = on_gpu(work);
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i)
    ASSERT_NEAR(got[i], want[i], bound * (1 + std::abs(double(want[i])))) << i;
}

void append(Numbers& to, const Numbers& from) { to.insert(to.end(), from.begin(), from.end()); }

// Neither a multiple of a warp nor of a block; more rows than a chunk of the norm's sums.
constexpr int64_t kRows = 149, kWidth = 272, kExperts = 5;

std::vector<uint8_t> bytes(int64_t count, uint64_t stream, uint64_t below = 256) {
  std::vector<uint8_t> all;
  for (int64_t i = 0; i < count; ++i)
    all.push_back(uint8_t(random_word({7, stream, uint64_t(i)}) % below));
  return all;
}

TEST_F(TrainEngine, CopiesCastsAndAdds) {
  Numbers values = normals<float>(70001, 1);
  values[3] = INFINITY, values[5] = -0.0f, values[8] = 1e-39f;
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    expect_equal([&](Engine& engine) {
      const Buffer<float> from = put(engine, values), to = put(engine, normals<float>(70001, 2));
      const Buffer<float> copy = poisoned(engine, from.size()), none = poisoned(engine, 9);
      const Buffer<uint8_t> codes(engine, bytes_for(dtype, from.size()));
      engine.cast(dtype, codes.data(), from.data(), from.size());
      engine.add(dtype, to.data(), codes.data(), to.size());
      engine.copy(copy.data(), from.data(), from.bytes());
      engine.clear(none.data(), 5 * 4);
      Numbers all = get(engine, to);
      append(all, get(engine, copy));
      for (const float x : get(engine, none)) all.push_back(std::isnan(x) ? -1 : x);
      return all;
    });
  }
}

TEST_F(TrainEngine, SendsMoreThanItHasPinnedRoomFor) {
  const auto gpu = open_engine(first_gpu());
  std::vector<uint8_t> many = bytes((21 << 20) + 5, 1);
  const std::vector<uint8_t> want = many;
  const Buffer<uint8_t> there = put(*gpu, many);
  std::fill(many.begin(), many.end(), uint8_t(0));  // the host may, once it is sent
  EXPECT_TRUE(get(*gpu, there) == want);
}

TEST_F(TrainEngine, EmbedsWithEqualBits) {
  constexpr int64_t window = 3, width = 80;
  // Few different bytes, so that many rows meet in one entry; and all.
  for (const uint64_t below : {3, 256}) {
    const auto windows = bytes(kRows * window, 2, below);
    expect_equal([&](Engine& engine) {
      const Buffer<uint8_t> at = put(engine, windows);
      const WindowArgs args{at.data(), kRows, window, width};
      const Buffer<float> table = put(engine, normals<float>(window * 256 * width, 3));
      const Buffer<float> x = poisoned(engine, kRows * width),
                          dtable = poisoned(engine, table.size());
      engine.embed(args, table.data(), x.data());
      engine.embed_backward(args, x.data(), dtable.data());
      Numbers all = get(engine, x);
      append(all, get(engine, dtable));
      return all;
    });
  }
}

TEST_F(TrainEngine, Norms) {
  // Sums of kWidth or kRows terms of size one in another order.
  expect_near(kWidth * 0x1p-23, [&](Engine& engine) {
    const Buffer<float> x = put(engine, normals<float>(kRows * kWidth, 1));
    const Buffer<float> gain = put(engine, normals<float>(kWidth, 2));
    const Buffer<float> du = put(engine, normals<float>(kRows * kWidth, 3));
    const Buffer<float> dx = put(engine, normals<float>(kRows * kWidth, 4));
    const Buffer<float> rstd = poisoned(engine, kRows), u = poisoned(engine, x.size()),
                        dgain = poisoned(engine, kWidth);
    const NormArgs args{x.data(), gain.data(), rstd.data(), kRows, kWidth};
    engine.norm(args, u.data());
    engine.norm_backward(args, du.data(), dx.data(), dgain.data());
    Numbers all = get(engine, u);
    for (const Buffer<float>* each : {&rstd, &dx, &dgain}) append(all, get(engine, *each));
    return all;
  });
}

TEST_F(TrainEngine, FindsLossesAndTheirGradient) {
  Numbers logits = normals<float>(kRows * kSymbols, 1);
  for (float& l : logits) l *= 6;
  for (size_t i = 0; i < 256; ++i) logits[i] = i == 77 ? 1e30f : -1e30f;
  auto targets = bytes(kRows, 4);
  targets[0] = 77;                      // of no loss, so that the others count
  constexpr int64_t rows = kRows - 20;  // the others stay as they are
  expect_near(1e-5, [&](Engine& engine) {
    const Buffer<float> scores = put(engine, logits);
    const Buffer<uint8_t> target = put(engine, targets);
    const Buffer<double> loss = put(engine, std::vector<double>{1000});
    engine.cross_entropy(scores.data(), target.data(), rows, loss.data());
    Numbers all = get(engine, scores);
    all.push_back(float(get(engine, loss)[0]));
    return all;
  });
}

TEST_F(TrainEngine, BalancesAndCountsRows) {
  expect_equal([&](Engine& engine) {
    const Buffer<int32_t> offsets = put(engine, std::vector<int32_t>{0, 7, 7, 100, 101, 298});
    const LoadArgs args{offsets.data(), kExperts};
    const Buffer<float> dscore = poisoned(engine, kRows * kExperts);
    const Buffer<int64_t> load = put(engine, std::vector<int64_t>{1, 2, 3, 4, int64_t(1) << 40});
    engine.balance(args, 0.03f, dscore.data(), kRows);
    engine.count_rows(args, load.data());
    Numbers all = get(engine, dscore);
    for (const int64_t rows : get(engine, load)) all.push_back(float(rows % 1000));
    return all;
  });
}

TEST_F(TrainEngine, Updates) {
  for (const float size : {100.0f, 1e-3f}) {  // clipped and not
    expect_near(1e-6, [&](Engine& engine) {
      std::vector<Buffer<float>> arrays;
      std::vector<Weight> weights;
      const int64_t counts[] = {9001, 3, 4096};
      for (size_t w = 0; w < 3; ++w) {
        Weight weight;
        weight.count = counts[w];
        weight.decays = w != 1;
        float** const places[] = {&weight.value, &weight.grad, &weight.mean, &weight.square};
        for (size_t i = 0; i < 4; ++i) {
          Numbers values = normals<float>(size_t(weight.count), 10 * w + i);
          for (float& v : values) v = i == 3 ? v * v : i == 1 ? v * size : v;
          arrays.push_back(put(engine, values));
          *places[i] = arrays.back().data();
        }
        weights.push_back(weight);
      }
      engine.update({1e-2, 0.1, 0.25, 3}, weights);
      Numbers all;
      for (const Buffer<float>& array : arrays) append(all, get(engine, array));
      return all;
    });
  }
}

TEST_F(TrainEngine, SaysThatMemoryIsShort) {
  const auto gpu = open_engine(first_gpu());
  try {
    gpu->take(int64_t(1) << 50);
    FAIL() << "1024 TiB were given";
  } catch (const DeviceError& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("has no 1125899906842624 bytes left; lower --rows"), what.npos) << what;
  }
  // And goes on.
  EXPECT_EQ(get(*gpu, put(*gpu, Numbers{1, 2})), (Numbers{1, 2}));
}

}  // namespace
}  // namespace cadre::train
