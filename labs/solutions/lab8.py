from tasks import Question
from tasks.task import set_rewards

__all__ = ["predicted", "questions", "shown", "step", "worth"]

predicted = 40  # a guess

WHO, WHOSE = (
    ("director", "producer", "founder", "mayor", "employer"),
    ("film", "company", "city", "person"),
)


def questions(split):
    """The texts are cut into the splits, so that none is held out and trained on; an id says split
    and place."""
    texts = [f"Name the {who} of the {whose}?" for who in WHO for whose in WHOSE]
    some = {"train": texts[:16], "valid": [], "test": texts[16:]}[split]
    return [Question(f"{split}-{k}", text) for k, text in enumerate(some)]


def worth(tau):
    """The number of words is looked at first; then both have a first letter."""
    words = (tau.prediction or "").split()
    return float(len(words) == 2 and words[0][0] == words[1][0])


def shown(tau):
    """The reason stands behind the response, where the right answer stands in a task that has
    one."""
    if tau.prediction is None:
        why = "there is no answer"
    elif len(tau.prediction.split()) != 2:
        why = "the answer is not exactly two words"
    else:
        why = "its two words begin with different letters"
    return f"Question: {tau.question.text}\n{tau.response.strip()}\nWorth nothing: {why}."


def step(t, P, player, task, questions, rng, G):
    """Rewards before advantages, advantages before the update; the instructions are credited with
    the same rewards."""
    jobs = P.draw_jobs(rng, questions, G)
    taus = player.rollout(t, "rollout", jobs)
    set_rewards(task, taus)
    player.learner.set_advantages(taus)
    player.learner.update(t, [taus])
    P.update_weights(taus)
    return taus
