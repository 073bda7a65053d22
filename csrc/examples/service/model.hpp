// A toy model with the data flow of a real one, and the workers that compute it.
//
// What a layer keeps for a token depends, through the layers below, on all tokens before it; positions are
// rotated into queries and keys; the next token is the likeliest of a vocabulary. So a prefix that was reused
// wrongly, a position that was lost or a block of someone else changes what is said. All weights are hashes.
#pragma once

#include <kvpool.hpp>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "attention.hpp"

namespace service {

inline constexpr uint32_t VOCABULARY = 512;

// Computes jobs 0..n on all its threads, the calling one included.
class Workers {
public:
    explicit Workers(unsigned threads) {
        for (unsigned i = 1; i < threads; ++i) threads_.emplace_back([this, i] { work(i); });
    }
    ~Workers() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }
    unsigned count() const { return static_cast<unsigned>(threads_.size()) + 1; }

    // job(i, worker) for every i; returns when all are done.
    void run(uint32_t n, const std::function<void(uint32_t, unsigned)>& job) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            job_ = &job;
            num_jobs_ = n;
            running_ = count();
            ++round_;
        }
        wake_.notify_all();
        share(job, n, 0);
        std::unique_lock<std::mutex> lock(mutex_);
        --running_;
        done_.wait(lock, [this] { return running_ == 0; });
    }

private:
    void share(const std::function<void(uint32_t, unsigned)>& job, uint32_t n, unsigned worker) {
        for (uint32_t i = worker; i < n; i += count()) job(i, worker);
    }
    void work(unsigned worker) {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return stop_ || round_ != seen; });
            if (stop_) return;
            seen = round_;
            const auto* job = job_;
            const uint32_t n = num_jobs_;
            lock.unlock();
            share(*job, n, worker);
            lock.lock();
            if (--running_ == 0) done_.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, done_;
    const std::function<void(uint32_t, unsigned)>* job_ = nullptr;
    uint32_t num_jobs_ = 0;
    uint64_t round_ = 0;
    unsigned running_ = 0;
    bool stop_ = false;
    std::vector<std::thread> threads_;
};

class Model {
public:
    Model(const kvpool::Cache& cache, unsigned threads, bool verify)
        : info_(cache.plan_info().value()), workers_(threads), verify_(verify), scratch_(threads) {
        width_ = info_.num_q_heads * info_.head_dim;
        kv_width_ = info_.num_kv_heads * info_.head_dim;
        for (uint32_t i = 0; i < info_.num_layers; ++i) {
            LayerView view = {};
            view.layer = cache.layer(i).value();
            view.group = cache.group(view.layer.group).value();
            layers_.push_back(view);
        }
        weights_.resize(size_t{info_.num_layers} * 3 * width_);
        for (size_t i = 0; i < weights_.size(); ++i) weights_[i] = 1.5f * random(1, i);
        embedding_.resize(size_t{VOCABULARY} * width_);
        for (size_t i = 0; i < embedding_.size(); ++i) embedding_[i] = random(2, i);
        unembedding_.resize(embedding_.size());
        for (size_t i = 0; i < embedding_.size(); ++i) unembedding_[i] = random(3, i);
        const size_t rows = info_.max_batch_tokens;
        x_.resize(rows * width_), q_.resize(rows * width_), out_.resize(rows * width_);
        k_.resize(rows * kv_width_), v_.resize(rows * kv_width_);
        if (verify_) checked_.resize(rows * width_);
    }

    // Computes a step and gives the token that follows each row of `last`, the last of a sequence each.
    kvpool::Result<void> step(kvpool::Step& step, const std::vector<uint32_t>& tokens,
                              const std::vector<uint32_t>& last, std::vector<uint32_t>& next) {
        const kvpool::StepView view = step.view().value();
        const uint32_t rows = view.num_tokens();
        seq_of_row_.resize(rows);
        for (const kvpool::BatchSeq& seq : view.seqs) {
            for (uint32_t row = 0; row < seq.rows; ++row) seq_of_row_[seq.row_start + row] = &seq;
        }
        for (uint32_t i = 0; i < info_.num_layers; ++i) {
            LayerView& layer = layers_[i];
            layer.tables = step.group(layer.layer.group).value();
            workers_.run(rows, [&](uint32_t row, unsigned) {
                if (i == 0) embed(row, tokens[row]);
                project(i, row, view.positions[row]);
                append_row(layer, row, k(row), v(row));
            });
            if (auto marked = step.mark_appended(i); !marked) return marked;
            // All K and V of the step are there.
            workers_.run(rows, [&](uint32_t row, unsigned worker) {
                attend_row(layer, seq_of_row_[row]->slot, view.positions[row], info_.num_q_heads, q(row),
                           out(row), scratch_[worker]);
                mix(row);
            });
            if (auto same = compare(step, i, rows); !same) return same;
        }
        next.resize(last.size());
        workers_.run(static_cast<uint32_t>(last.size()),
                     [&](uint32_t i, unsigned) { next[i] = likeliest(x(last[i])); });
        return {};
    }

    // The largest difference to kvpool's own attention so far.
    float largest_difference() const { return largest_difference_; }

private:
    // In -1..1.
    static float random(uint64_t kind, uint64_t i) {
        uint64_t z = (kind << 48) + (i + 1) * 0x9E3779B97F4A7C15u;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        return static_cast<float>((z ^ z >> 31) >> 40) / 8388608.0f - 1.0f;
    }
    float* x(uint32_t row) { return &x_[size_t{row} * width_]; }
    float* q(uint32_t row) { return &q_[size_t{row} * width_]; }
    float* out(uint32_t row) { return &out_[size_t{row} * width_]; }
    float* k(uint32_t row) { return &k_[size_t{row} * kv_width_]; }
    float* v(uint32_t row) { return &v_[size_t{row} * kv_width_]; }

    void embed(uint32_t row, uint32_t token) {
        std::memcpy(x(row), &embedding_[size_t{token} * width_], width_ * sizeof(float));
    }
    // Queries, keys and values of a row: x, scaled and displaced by weights; Q and K rotated by the position.
    void project(uint32_t layer, uint32_t row, uint32_t position) {
        const float* weights = &weights_[size_t{layer} * 3 * width_];
        for (uint32_t i = 0; i < width_; ++i) q(row)[i] = 2 * x(row)[i] * weights[i];
        for (uint32_t i = 0; i < kv_width_; ++i) {
            k(row)[i] = 2 * x(row)[(i + 3) % width_] * weights[width_ + i];
            v(row)[i] = x(row)[(i + 7) % width_] * weights[2 * width_ + i];
        }
        rotate(q(row), width_, position);
        rotate(k(row), kv_width_, position);
    }
    void rotate(float* vector, uint32_t width, uint32_t position) const {
        for (uint32_t i = 0; i < width; i += 2) {
            const float turns = static_cast<float>(i % info_.head_dim) / static_cast<float>(info_.head_dim);
            const float angle = static_cast<float>(position) * std::pow(100.0f, -turns);
            const float c = std::cos(angle), s = std::sin(angle), a = vector[i], b = vector[i + 1];
            vector[i] = c * a - s * b;
            vector[i + 1] = s * a + c * b;
        }
    }
    // What a row has attended to becomes part of it, kept within -1..1.
    void mix(uint32_t row) {
        for (uint32_t i = 0; i < width_; ++i) {
            const float sum = 0.7f * x(row)[i] + 1.5f * out(row)[(i + 5) % width_];
            x(row)[i] = sum / (0.5f + std::fabs(sum));
        }
    }
    uint32_t likeliest(const float* x) const {
        uint32_t best = 0;
        float most = -INFINITY;
        for (uint32_t token = 0; token < VOCABULARY; ++token) {
            float logit = 0;
            for (uint32_t i = 0; i < width_; ++i) logit += x[i] * unembedding_[size_t{token} * width_ + i];
            if (logit > most) most = logit, best = token;
        }
        return best;
    }

    // In verify mode: our attention beside kvpool's, which reads the same pool.
    kvpool::Result<void> compare(kvpool::Step& step, uint32_t layer, uint32_t rows) {
        if (!verify_) return {};
        const size_t len = size_t{rows} * width_;
        const kvpool::span<float> theirs(checked_.data(), len);
        auto attended = step.attend(layer, kvpool::span<const float>(q_.data(), len), theirs);
        if (!attended) return attended;
        // Values are within 1.5; kernels for 16 bits may round queries to them.
        const kvpool::Format format = layers_[layer].layer.format();
        const float allowed = format == kvpool::Format::f32   ? 1e-4f
                              : format == kvpool::Format::f16 ? 4e-3f
                                                              : 3e-2f;
        for (size_t i = 0; i < len; ++i) {
            const float difference = std::fabs(theirs[i] - out_[i]);
            largest_difference_ = std::fmax(largest_difference_, difference);
            if (!(difference <= allowed)) {
                char message[160];
                std::snprintf(message, sizeof(message), "layer %u: our attention is %g, kvpool's %g", layer,
                              static_cast<double>(out_[i]), static_cast<double>(theirs[i]));
                return kvpool::Error(kvpool::Status::invariant, message);
            }
        }
        return {};
    }

    kvpool::PlanInfo info_;
    uint32_t width_, kv_width_;
    std::vector<LayerView> layers_;
    Workers workers_;
    bool verify_;
    float largest_difference_ = 0;
    std::vector<Scratch> scratch_;
    std::vector<float> weights_, embedding_, unembedding_, x_, q_, k_, v_, out_, checked_;
    std::vector<const kvpool::BatchSeq*> seq_of_row_;
};

}  // namespace service
