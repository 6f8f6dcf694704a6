use super::*;

#[test]
fn every_field_is_reached_in_a_pod_that_can_be_read() {
    let fields = pod_fields();
    let kinds = kinds(&fields);
    for field in &fields {
        let good = good(field, &kinds);
        assert!(good.pod.pointer(&good.pointer).is_some(), "{field}: nothing at {}", good.pointer);
        serde_json::from_value::<Pod>(good.pod).unwrap();
    }
}

#[test]
fn a_case_differs_from_its_good_pod_in_its_field_only() {
    let cases = cases();
    for case in cases.iter().step_by(97) {
        let mut pod = case.pod();
        let place = pod.pointer_mut(&case.good.pointer).unwrap();
        *place = case.good.pod.pointer(&case.good.pointer).unwrap().clone();
        assert_eq!(pod, case.good.pod, "{case}");
    }
    let of = |group| cases.iter().filter(|case| case.group == group).count();
    println!(
        "{} cases: {} of numbers, {} of texts, {} of counts, {} of types",
        cases.len(),
        of(Group::Numbers),
        of(Group::Texts),
        of(Group::Counts),
        of(Group::Types)
    );
}

#[test]
fn elements_have_names_of_their_own() {
    let cases = cases();
    let many =
        |case: &&Case| case.hostile == Hostile::Elements(2) && case.field.to_string() == "spec.containers";
    let pod = cases.iter().find(many).unwrap().pod();
    let name = |number: usize| pod["spec"]["containers"][number]["name"].clone();
    assert_eq!((name(0), name(1)), (json!("main0"), json!("main1")));
}
